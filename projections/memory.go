package projections

import (
	"bytes"
	"slices"
	"sort"
)

// Memory is a [Table] in memory: sorted blocks of sorted rows. It must not be written
// to while it is read.
type Memory struct {
	blocks []*block
	rows   int
	mark   *byte // of the blocks that only this table has
}

// block is a run of rows, which is not empty. A table changes only blocks with its own mark:
// others may belong to a copy too.
type block struct {
	rows []row
	mark *byte
}

type row struct{ key, value []byte }

// blockRows bounds how many rows an insertion may have to move.
const blockRows = 256

var _ Table = (*Memory)(nil)

// NewMemory returns an empty table.
func NewMemory() *Memory { return &Memory{mark: new(byte)} }

// Clone returns a copy. It takes a pointer for each 128 to 256 rows: the tables share their
// rows until one of them changes some. The copy may be read while m is written to.
func (m *Memory) Clone() *Memory {
	m.mark = new(byte)
	return &Memory{blocks: slices.Clone(m.blocks), rows: m.rows, mark: new(byte)}
}

// own returns the rows of a block to be changed.
func (m *Memory) own(b int) *block {
	if m.blocks[b].mark != m.mark {
		m.blocks[b] = &block{slices.Clone(m.blocks[b].rows), m.mark}
	}
	return m.blocks[b]
}

// Len returns the number of rows.
func (m *Memory) Len() int { return m.rows }

// block returns the index of the block that holds key, or would hold it.
func (m *Memory) block(key []byte) int {
	next := sort.Search(len(m.blocks), func(i int) bool { return bytes.Compare(m.blocks[i].rows[0].key, key) > 0 })
	return max(next-1, 0)
}

func find(rows []row, key []byte) (int, bool) {
	return slices.BinarySearchFunc(rows, key, func(r row, key []byte) int { return bytes.Compare(r.key, key) })
}

// Get implements [Reader].
func (m *Memory) Get(key []byte) ([]byte, error) {
	if m.rows == 0 {
		return nil, nil
	}
	rows := m.blocks[m.block(key)].rows
	if i, ok := find(rows, key); ok {
		return bytes.Clone(rows[i].value), nil
	}
	return nil, nil
}

// Scan implements [Reader].
func (m *Memory) Scan(lo, hi []byte, visit func(key, value []byte) error) error {
	if m.rows == 0 {
		return nil
	}
	first := m.block(lo)
	i, _ := find(m.blocks[first].rows, lo)
	for _, b := range m.blocks[first:] {
		for _, r := range b.rows[i:] {
			if hi != nil && bytes.Compare(r.key, hi) >= 0 {
				return nil
			}
			if err := visit(r.key, r.value); err != nil {
				return err
			}
		}
		i = 0
	}
	return nil
}

// Set implements [Table].
func (m *Memory) Set(key, value []byte) error {
	value = append([]byte{}, value...)
	if m.rows == 0 {
		m.blocks, m.rows = []*block{{[]row{{bytes.Clone(key), value}}, m.mark}}, 1
		return nil
	}
	b := m.block(key)
	own := m.own(b)
	i, ok := find(own.rows, key)
	if ok {
		own.rows[i].value = value
		return nil
	}
	own.rows = slices.Insert(own.rows, i, row{bytes.Clone(key), value})
	m.rows++
	if rows := own.rows; len(rows) > blockRows {
		half := len(rows) / 2
		own.rows = slices.Clone(rows[:half])
		m.blocks = slices.Insert(m.blocks, b+1, &block{slices.Clone(rows[half:]), m.mark})
	}
	return nil
}

// Delete implements [Table].
func (m *Memory) Delete(key []byte) error {
	if m.rows == 0 {
		return nil
	}
	b := m.block(key)
	i, ok := find(m.blocks[b].rows, key)
	if !ok {
		return nil
	}
	m.rows--
	own := m.own(b)
	if own.rows = slices.Delete(own.rows, i, i+1); len(own.rows) == 0 {
		m.blocks = slices.Delete(m.blocks, b, b+1)
	}
	return nil
}
