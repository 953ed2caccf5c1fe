"""From calibration data to statistics: observers, one module per algorithm, and the data."""
