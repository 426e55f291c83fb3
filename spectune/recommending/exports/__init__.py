"""Ready commands and files: the chosen configuration in the words of each server, for a stated version.

Names change between releases, so every export carries the version that its names were taken from, and each module
holds the names that this version takes. Nothing is translated silently: where a server has no such method, that is
what is said.
"""
