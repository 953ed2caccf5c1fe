"""Facts about Muse Spark with its vision and audio towers."""
