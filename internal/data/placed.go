package data

import "fmt"

// place fills in the entries of items that need no writing. Of those that are
// in the rank's own file, the digest is left for whoever writes them.
func (x *index) place(u reuse) {
	for _, f := range u.files {
		x.files = append(x.files, File{Name: f.name, Size: f.size})
	}
	for i, s := range u.of {
		e := &x.entries[i]
		if s.file < 0 {
			e.offset, e.key = x.entries[s.tied].offset, x.entries[s.tied].key
			continue
		}
		e.file, e.offset, e.key = 1+s.file, s.entry.offset, s.entry.key
		e.digest, e.sums = s.entry.digest, s.entry.sums
	}
}

// tie gives equal items the digest and sums of the one that was written. That
// must be what was digested before it was written.
func (x *index) tie(u reuse) error {
	for i, s := range u.of {
		if s.file >= 0 {
			continue
		}
		e, of := &x.entries[i], &x.entries[s.tied]
		if of.digest != s.digest {
			return fmt.Errorf("bytes of %q changed while they were saved", of.item.Shard.FQN)
		}
		e.digest, e.sums = of.digest, of.sums
	}
	return nil
}

// own are the entries that have bytes of their own in the rank's data file, in
// the order of the items: of equal ones that lie there once, the first.
func (x *index) own() []int {
	var own []int
	seen := map[int64]bool{}
	for i := range x.entries {
		e := &x.entries[i]
		if e.file != 0 || e.item.Bytes > 0 && seen[e.offset] {
			continue
		}
		if e.item.Bytes > 0 {
			seen[e.offset] = true
		}
		own = append(own, i)
	}
	return own
}
