package beneath

// Walking returns r as on a system without openat2.
func (r Root) Walking() Root {
	r.walks = true
	return r
}
