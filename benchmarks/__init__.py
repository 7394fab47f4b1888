"""Each measured claim of the documents, as a command that writes its records."""
