"""``shardprep report``: one page of a data set: what it holds, how it was made, how to make it again."""
