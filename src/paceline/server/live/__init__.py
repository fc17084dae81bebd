"""The pages in the browser and the feed behind them."""
