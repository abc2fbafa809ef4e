"""
Tools of those who work on the project: golden.py proves that a change of the code changes no result.

A module here may import everything; nothing imports a module of this folder.
"""
