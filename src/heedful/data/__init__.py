"""Text becomes records, and records become tokens.

Text side: ``files`` (rows of any file), ``formats`` (recognise, import, export), ``load`` (records with counts and
reasons), ``pairs`` (rankings → preference pairs), ``duplicates``, ``splits``, ``inspect``, ``export``.
Token side: ``chat``, ``tokenise``, ``packing``, ``collate``.
"""
