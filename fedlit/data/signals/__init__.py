"""Parts of data modules of time series: recordings, windows, splits, and networks that prepare windows."""
