package audit

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/mod/sumdb/tlog"
)

// Row is the row of a trial in the run map: how many entries it has, the sequence of
// the last, and a chain over all of them. Run and Trial are written as in subjects.
type Row struct {
	Run   string `json:"run"`
	Trial string `json:"trial"`
	Count uint64 `json:"count"`
	Last  uint64 `json:"last"`
	Chain Hash   `json:"chain"` // SHA-256(chain before ‖ hash of the entry), from zeros
}

func (r Row) compare(o Row) int {
	return cmp.Or(cmp.Compare(r.Run, o.Run), cmp.Compare(r.Trial, o.Trial))
}

// add appends an entry of the trial.
func (r *Row) add(sequence uint64, entry Hash) {
	r.Count++
	r.Last = sequence
	var both [2 * sha256.Size]byte
	copy(both[:], r.Chain[:])
	copy(both[sha256.Size:], entry[:])
	r.Chain = sha256.Sum256(both[:])
}

// hash returns the row's leaf in the tree of the run map.
func (r Row) hash() Hash {
	b := []byte("ckptstore-run/v1\x00")
	for _, name := range []string{r.Run, r.Trial} {
		b = binary.BigEndian.AppendUint16(b, uint16(len(name))) //nolint:gosec // part of a subject, see Entry
		b = append(b, name...)
	}
	b = binary.BigEndian.AppendUint64(b, r.Count)
	b = binary.BigEndian.AppendUint64(b, r.Last)
	return tlog.RecordHash(append(b, r.Chain[:]...))
}

type trialKey struct{ run, trial string }

// Runs is the run map. Its zero value is empty.
type Runs struct{ rows map[trialKey]*Row }

// RunsOf returns the run map with these rows.
func RunsOf(rows []Row) *Runs {
	m := &Runs{rows: make(map[trialKey]*Row, len(rows))}
	for _, r := range rows {
		m.rows[trialKey{r.Run, r.Trial}] = &r
	}
	return m
}

// Add adds the entry of a message.
func (m *Runs) Add(subject string, sequence uint64, entry Hash) {
	run, trial := Trial(subject)
	k := trialKey{run, trial}
	if m.rows == nil {
		m.rows = map[trialKey]*Row{}
	}
	row := m.rows[k]
	if row == nil {
		row = &Row{Run: run, Trial: trial}
		m.rows[k] = row
	}
	row.add(sequence, entry)
}

// Len returns the number of trials.
func (m *Runs) Len() int { return len(m.rows) }

// Rows returns the rows in the order of the map's tree: by run, then by trial.
func (m *Runs) Rows() []Row {
	out := make([]Row, 0, len(m.rows))
	for r := range maps.Values(m.rows) {
		out = append(out, *r)
	}
	slices.SortFunc(out, Row.compare)
	return out
}

// PlacedRow is a row with its place in the run map and the proof of it.
type PlacedRow struct {
	Row
	Index int64  `json:"index"`
	Proof []Hash `json:"proof"`
}

// rowTree returns the stored hashes of the tree over rows.
func rowTree(rows []Row) (tlog.HashReaderFunc, error) {
	var stored []tlog.Hash
	read := tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) {
		out := make([]tlog.Hash, len(indexes))
		for i, x := range indexes {
			out[i] = stored[x]
		}
		return out, nil
	})
	for i, r := range rows {
		hashes, err := tlog.StoredHashesForRecordHash(int64(i), r.hash(), read)
		if err != nil {
			return nil, err
		}
		stored = append(stored, hashes...)
	}
	return read, nil
}

// RowsRoot returns the root of the run map over its sorted rows.
func RowsRoot(rows []Row) (Hash, error) {
	read, err := rowTree(rows)
	if err != nil {
		return Hash{}, err
	}
	return tlog.TreeHash(int64(len(rows)), read)
}

// ProveRun returns the rows of all trials of a run and the two rows around them, which
// prove that the run has no other trial.
func ProveRun(rows []Row, run string) (out []PlacedRow, err error) {
	first, _ := slices.BinarySearchFunc(rows, run, func(r Row, run string) int { return cmp.Compare(r.Run, run) })
	end := first
	for end < len(rows) && rows[end].Run == run {
		end++
	}
	read, err := rowTree(rows)
	if err != nil {
		return nil, err
	}
	for i := max(0, first-1); i < min(len(rows), end+1); i++ {
		proof, err := tlog.ProveRecord(int64(len(rows)), int64(i), read)
		if err != nil {
			return nil, err
		}
		out = append(out, PlacedRow{Row: rows[i], Index: int64(i), Proof: proof})
	}
	return out, nil
}

// CheckRun checks the rows of [ProveRun] against the root of a run map with size rows,
// and returns those of the run. Its error matches [ErrMissingTrial] if the run may have
// other trials.
func CheckRun(placed []PlacedRow, run string, size int64, root Hash) (own []Row, err error) {
	if len(placed) == 0 {
		return nil, fmt.Errorf("%w: the run map has no row", ErrMissingTrial)
	}
	for i, p := range placed {
		if err := tlog.CheckRecord(p.Proof, size, root, p.Index, p.hash()); err != nil {
			return nil, fmt.Errorf("%w: row %s/%s of the run map: %w", ErrTampered, p.Run, p.Trial, err)
		}
		if i > 0 && (p.Index != placed[i-1].Index+1 || placed[i-1].compare(p.Row) >= 0) {
			return nil, fmt.Errorf("%w: rows %d and %d of the run map are not neighbours", ErrMissingTrial, placed[i-1].Index, p.Index)
		}
		if p.Run == run {
			own = append(own, p.Row)
		}
	}
	first, last := placed[0], placed[len(placed)-1]
	if first.Index != 0 && first.Run >= run {
		return nil, fmt.Errorf("%w: nothing shows what is before row %d of the run map", ErrMissingTrial, first.Index)
	}
	if last.Index != size-1 && last.Run <= run {
		return nil, fmt.Errorf("%w: nothing shows what follows row %d of %d of the run map", ErrMissingTrial, last.Index, size)
	}
	return own, nil
}
