package planner

// NewCache returns a cache of at most size sets of plans.
func NewCache(size int) *Cache { return newCache(size) }
