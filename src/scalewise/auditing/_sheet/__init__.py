"""The balance sheet: each operation's share of the outputs' error, from one pass backwards."""
