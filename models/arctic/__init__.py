"""Facts about Snowflake Arctic."""
