"""People rank answers: a web app, its tables, the queue, quality control, and the way back into training.

settings → tables → database → trail, people, project, queue, submissions → submitted, quality → master → web → raters.
Without torch; every library of the ``annotate`` extra is imported here alone.
"""
