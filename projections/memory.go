package projections

import (
	"bytes"
	"slices"
	"sort"
)

// Memory is a [Table] in memory: sorted blocks of sorted rows. It must not be written
// to while it is read.
type Memory struct {
	blocks [][]row // none empty
	rows   int
}

type row struct{ key, value []byte }

// blockRows bounds how many rows an insertion may have to move.
const blockRows = 256

var _ Table = (*Memory)(nil)

// NewMemory returns an empty table.
func NewMemory() *Memory { return &Memory{} }

// Len returns the number of rows.
func (m *Memory) Len() int { return m.rows }

// block returns the index of the block that holds key, or would hold it.
func (m *Memory) block(key []byte) int {
	next := sort.Search(len(m.blocks), func(i int) bool { return bytes.Compare(m.blocks[i][0].key, key) > 0 })
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
	rows := m.blocks[m.block(key)]
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
	i, _ := find(m.blocks[first], lo)
	for _, rows := range m.blocks[first:] {
		for _, r := range rows[i:] {
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
		m.blocks, m.rows = [][]row{{{bytes.Clone(key), value}}}, 1
		return nil
	}
	b := m.block(key)
	rows := m.blocks[b]
	i, ok := find(rows, key)
	if ok {
		rows[i].value = value
		return nil
	}
	rows = slices.Insert(rows, i, row{bytes.Clone(key), value})
	m.blocks[b] = rows
	m.rows++
	if len(rows) > blockRows {
		half := len(rows) / 2
		m.blocks[b] = slices.Clone(rows[:half])
		m.blocks = slices.Insert(m.blocks, b+1, slices.Clone(rows[half:]))
	}
	return nil
}

// Delete implements [Table].
func (m *Memory) Delete(key []byte) error {
	if m.rows == 0 {
		return nil
	}
	b := m.block(key)
	i, ok := find(m.blocks[b], key)
	if !ok {
		return nil
	}
	m.rows--
	m.blocks[b] = slices.Delete(m.blocks[b], i, i+1)
	if len(m.blocks[b]) == 0 {
		m.blocks = slices.Delete(m.blocks, b, b+1)
	}
	return nil
}
