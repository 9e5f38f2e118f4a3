package dcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/big"
	"strings"
	"unicode/utf8"
)

// The objects that the machine builds. None is nil; bool, int64, *big.Int, float64, string
// and []byte stand for themselves. The containers that Python can change after they are
// memoized are pointers.
type (
	global struct{ module, name string }
	tuple  []any
	list   struct{ items []any }
	// dict has key, value, key, value. Its readers compare keys.
	dict struct{ pairs []any }
	// call is a REDUCE or NEWOBJ that was not executed: nothing is ever called.
	call struct {
		fn    global
		args  tuple
		new   bool // NEWOBJ
		built bool // state is set
		state any  // of BUILD
		pos   int  // of the opcode
	}
	persistent struct{ id any }
)

func (g global) String() string { return g.module + "." + g.name }

// dialect lists the allowed contents of a kind of pickle.
type dialect struct {
	ops     string // opcodes
	globals func(global) bool
	// opaque makes a global that is not listed an [OpaqueError].
	opaque bool
}

// maxInteger bounds integers, in bytes: printing one takes quadratic time.
const maxInteger = 1024

// machine runs a pickle. Each opcode pushes at most one object, and lengths are checked
// against the remaining bytes, so it needs memory in proportion to the pickle. Loops cannot
// be expressed.
type machine struct {
	dialect
	data  []byte
	pos   int // behind the opcode and arguments read so far
	op    int // position of the opcode
	stack []any
	marks []int // heights of the stack
	memo  []any
}

// unpickle runs data, which begins at offset base of file, and returns the
// object that STOP finds alone on the stack.
func unpickle(d dialect, data []byte, file string, base int64) (any, error) {
	m := &machine{dialect: d, data: data}
	v, err := m.run()
	return v, at(file, base+int64(m.op), err)
}

func (m *machine) run() (any, error) {
	var allowed [256]bool
	for i := range len(m.ops) {
		allowed[m.ops[i]] = true
	}
	for {
		m.op = m.pos
		b, err := m.take(1)
		if err != nil {
			return nil, err
		}
		op := b[0]
		if !allowed[op] {
			return nil, m.refused(op)
		}
		if (m.op == 0) != (op == opProto) {
			return nil, fmt.Errorf("opcode %s at the start: want PROTO there and nowhere else", opName(op))
		}
		if op == opStop {
			break
		}
		err = m.step(op)
		var opaque *OpaqueError
		if errors.As(err, &opaque) {
			return nil, err
		}
		if err != nil {
			return nil, fmt.Errorf("opcode %s: %w", opName(op), err)
		}
	}
	if len(m.stack) != 1 || len(m.marks) != 0 {
		return nil, fmt.Errorf("opcode STOP: %d objects and %d marks on the stack, want one object", len(m.stack), len(m.marks))
	}
	if rest := len(m.data) - m.pos; rest > 0 {
		return nil, fmt.Errorf("opcode STOP: %d bytes follow the end of the pickle", rest)
	}
	return m.stack[0], nil
}

func (m *machine) refused(op byte) error {
	if kind, ok := opaqueOps[op]; ok && m.opaque {
		return &OpaqueError{Global: kind}
	}
	return fmt.Errorf("opcode %s is not allowed", opName(op))
}

// take reads n bytes, which the result shares with the input.
func (m *machine) take(n uint64) ([]byte, error) {
	if left := uint64(len(m.data) - m.pos); n > left {
		return nil, fmt.Errorf("%d bytes wanted, the pickle has %d left", n, left)
	}
	b := m.data[m.pos : m.pos+int(n)]
	m.pos += int(n)
	return b, nil
}

// number reads a little-endian unsigned integer of size bytes.
func (m *machine) number(size int) (uint64, error) {
	var b [8]byte
	raw, err := m.take(uint64(size))
	copy(b[:], raw)
	return binary.LittleEndian.Uint64(b[:]), err
}

// counted reads bytes after their length, a number of size bytes.
func (m *machine) counted(size int) ([]byte, error) {
	n, err := m.number(size)
	if err != nil {
		return nil, err
	}
	return m.take(n)
}

func (m *machine) floor() int {
	if len(m.marks) == 0 {
		return 0
	}
	return m.marks[len(m.marks)-1]
}

func (m *machine) push(v any) { m.stack = append(m.stack, v) }

// pop takes the n topmost objects above the last mark. The slice is valid
// until the next push.
func (m *machine) pop(n int) ([]any, error) {
	if have := len(m.stack) - m.floor(); have < n {
		return nil, fmt.Errorf("%d objects wanted, the stack has %d above the mark", n, have)
	}
	top := m.stack[len(m.stack)-n:]
	m.stack = m.stack[:len(m.stack)-n]
	return top, nil
}

// popMark takes everything above the last mark, and the mark.
func (m *machine) popMark() ([]any, error) {
	if len(m.marks) == 0 {
		return nil, fmt.Errorf("no mark on the stack")
	}
	top, err := m.pop(len(m.stack) - m.floor())
	m.marks = m.marks[:len(m.marks)-1]
	return top, err
}

// top returns the topmost object, which stays.
func (m *machine) top() (any, error) {
	v, err := m.pop(1)
	if err != nil {
		return nil, err
	}
	m.stack = m.stack[:len(m.stack)+1]
	return v[0], nil
}

func (m *machine) text(b []byte) error {
	if !utf8.Valid(b) {
		if m.opaque {
			return &OpaqueError{Reason: "a string has lone surrogates or is not UTF-8"}
		}
		return fmt.Errorf("string %s is not UTF-8", quote(string(b)))
	}
	m.push(string(b))
	return nil
}

func (m *machine) integer(b []byte) error {
	if len(b) > maxInteger {
		if m.opaque {
			return &OpaqueError{Reason: fmt.Sprintf("an integer has %d bytes, at most %d are decoded", len(b), maxInteger)}
		}
		return fmt.Errorf("integer of %d bytes, at most %d are allowed", len(b), maxInteger)
	}
	if len(b) <= 8 {
		var full [8]byte
		if len(b) > 0 && b[len(b)-1]&0x80 != 0 {
			full = [8]byte{255, 255, 255, 255, 255, 255, 255, 255}
		}
		copy(full[:], b)
		m.push(int64(binary.LittleEndian.Uint64(full[:])))
		return nil
	}
	// Two's complement, little-endian.
	be := make([]byte, len(b))
	for i, x := range b {
		be[len(b)-1-i] = x
	}
	n := new(big.Int).SetBytes(be)
	if be[0]&0x80 != 0 {
		n.Sub(n, new(big.Int).Lsh(big.NewInt(1), uint(8*len(b))))
	}
	if n.IsInt64() {
		m.push(n.Int64())
	} else {
		m.push(n)
	}
	return nil
}

func (m *machine) float(b []byte) {
	m.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
}

// find is the allow-list: globals are reached only through it.
func (m *machine) find(g global) error {
	if !m.globals(g) {
		if m.opaque {
			if g.module == "__builtin__" { // up to protocol 2
				g.module = "builtins"
			}
			return &OpaqueError{Global: clip(g.String())}
		}
		return fmt.Errorf("global %s is not allowed", clip(g.String()))
	}
	m.push(g)
	return nil
}

// clip shortens text for a message, without quotes.
func clip(s string) string {
	q := quote(s)
	if end := strings.LastIndexByte(q, '"'); end > 0 {
		return q[1:end] + q[end+1:]
	}
	return q
}

// put stores the top in the memo. Picklers number their memo from 0 without gaps; other
// numbers could request any amount of memory.
func (m *machine) put(n uint64) error {
	v, err := m.top()
	if err != nil {
		return err
	}
	switch size := uint64(len(m.memo)); {
	case n == size:
		m.memo = append(m.memo, v)
	case n < size:
		m.memo[n] = v
	default:
		return fmt.Errorf("memo entry %d is out of sequence, %d are set", n, size)
	}
	return nil
}

func (m *machine) get(n uint64) error {
	if n >= uint64(len(m.memo)) {
		return fmt.Errorf("memo entry %d is not set", n)
	}
	m.push(m.memo[n])
	return nil
}
