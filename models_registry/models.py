"""Imports the tables of every noun, because Django looks for them here. Other code imports them from their noun."""

from kernel.nouns import noun_modules

noun_modules("models_registry", "models")
