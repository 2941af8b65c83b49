"""How Alembic runs: on the connection, and in the transaction, that ``Database.migrate`` opened."""

from alembic import context

from heedful.annotate.tables import Table

context.configure(connection=context.config.attributes["connection"], target_metadata=Table.metadata)
with context.begin_transaction():
    context.run_migrations()
