"""The Trimtab inference engine. Holds the version only: importing it must stay free of torch and cheap."""

__version__ = "0.1.0"
