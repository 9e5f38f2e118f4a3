package viewdb

// Every sets the distance of keyframes and how many there may be.
func (h *History) Every(events uint64, most int) { h.every, h.most = events, most }

// Keyframes returns the sequences of the keyframes.
func (h *History) Keyframes() (at []uint64) {
	for _, f := range h.frames {
		at = append(at, f.at)
	}
	return at
}
