package restore

import (
	"context"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// lendFiles finds the wants that ranks can copy out of the checkpoint's files and
// that no slot has, lent to them or not: allocating memory for them takes ten
// times as long as the copy. They are verified with the other reads, or by the
// rank that copies them.
func (r *restore) lendFiles(ctx context.Context, held staging.Copies) error {
	files, ok := r.reader.(*data.FileReader)
	if !ok {
		return nil
	}
	var wants []checkpoint.Want
	var reads []checkpoint.Read
	type want struct{ rank, want int }
	var whose []want
	for rank := range r.ranks {
		of := &r.ranks[rank]
		for _, read := range of.alone() {
			w := of.wants[read.Want]
			if of.spot(read.Want).lent() || of.shares(read.Want) {
				continue
			}
			if _, _, staged := held.Find(read.Rank, itemOf(w, read)); staged {
				continue
			}
			whose = append(whose, want{rank, read.Want})
			wants = append(wants, w)
			read.Want = len(wants) - 1
			reads = append(reads, read)
		}
	}
	spots, err := files.Spots(ctx, wants, reads)
	if err != nil {
		return err
	}
	r.files = map[string]int64{}
	for i, at := range spots {
		r.files[at.Path] = at.Size
		s := spot{file: at.Path, off: at.Offset}
		if r.ranks[whose[i].rank].checks(whose[i].want) {
			s.check = &at.Check
		}
		r.ranks[whose[i].rank].lendAt(whose[i].want, s)
	}
	for rank := range r.ranks {
		r.ranks[rank].replace()
	}
	return nil
}

// shares reports whether other nodes read some blocks of a want too.
func (of *restoreRank) shares(want int) bool { return of.shared != nil && of.shared[want] }

// lentFiles returns the paths of the files that are lent to a rank, in order and
// without duplicates.
func (of *restoreRank) lentFiles() (paths []string) {
	seen := map[string]bool{}
	for _, s := range of.spots {
		if s.file != "" && !seen[s.file] {
			seen[s.file] = true
			paths = append(paths, s.file)
		}
	}
	slices.Sort(paths)
	return paths
}
