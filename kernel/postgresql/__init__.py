"""Django's backend for a PostgreSQL that may have standbys: the database engine of the settings."""
