"""Every page: its fragments, the hints they listen to, and where they get what they show. No page changes anything."""
