package data

import (
	"fmt"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// placeReused fills in the entries of items that need no writing. Of those that are
// in the rank's own file, the digest is left for whoever writes them.
func placeReused(x *checkpoint.Index, u reuse) {
	for _, f := range u.files {
		x.Files = append(x.Files, checkpoint.File{Name: f.name, Size: f.size})
	}
	for i, s := range u.of {
		e := &x.Entries[i]
		if s.file < 0 {
			e.Offset, e.Key = x.Entries[s.tied].Offset, x.Entries[s.tied].Key
			continue
		}
		e.File, e.Offset, e.Key = 1+s.file, s.entry.Offset, s.entry.Key
		e.Digest, e.Sums = s.entry.Digest, s.entry.Sums
	}
}

// tieReused gives equal items the digest and sums of the one that was written. That
// must be what was digested before it was written.
func tieReused(x *checkpoint.Index, u reuse) error {
	for i, s := range u.of {
		if s.file >= 0 {
			continue
		}
		e, of := &x.Entries[i], &x.Entries[s.tied]
		if of.Digest != s.digest {
			return fmt.Errorf("bytes of %q changed while they were saved", of.Item.Shard.FQN)
		}
		e.Digest, e.Sums = of.Digest, of.Sums
	}
	return nil
}
