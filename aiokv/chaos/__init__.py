"""A real cluster that trains while its processes are killed and its connections cut: does it end with the same bits?"""
