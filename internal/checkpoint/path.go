package checkpoint

import (
	"fmt"
	"strconv"
	"strings"
)

// PathElement is one step of a [Path]: the key of a mapping, or the index of
// a list. Make one with [PathKey], [PathLiteral] or [PathIndex].
type PathElement struct {
	Key     string // "" where List
	Index   int    // 0 where not List
	List    bool
	Literal bool // Key is Python's notation of a key that is not a string
}

// PathKey returns the step into a mapping.
func PathKey(key string) PathElement { return PathElement{Key: key} }

// PathLiteral returns the step into a mapping by a key that is not a string, in Python's
// notation: 3, True, None, (0, 1). Only Python reads it.
func PathLiteral(key string) PathElement { return PathElement{Key: key, Literal: true} }

// PathIndex returns the step into a list, from 0.
func PathIndex(index int) PathElement { return PathElement{Index: index, List: true} }

// text returns the element's part of an FQN.
func (e PathElement) text() string {
	if e.List {
		return strconv.Itoa(e.Index)
	}
	return e.Key
}

// Path is the place of a tensor or value in the state dict before it was flattened: the entry
// that PyTorch keeps in planner_data. Its elements joined by dots are the FQN. A nil path
// stands for the single element with that FQN.
type Path []PathElement

// FQN joins the elements by dots.
func (p Path) FQN() string {
	parts := make([]string, len(p))
	for i, e := range p {
		parts[i] = e.text()
	}
	return strings.Join(parts, ".")
}

// String formats the path with keys quoted, indexes bare and literals in braces, such as
// ["optim" "state" 3] and ["optim" "state" {3}].
func (p Path) String() string {
	parts := make([]string, len(p))
	for i, e := range p {
		switch {
		case e.List:
			parts[i] = strconv.Itoa(e.Index)
		case e.Literal:
			parts[i] = "{" + e.Key + "}"
		default:
			parts[i] = strconv.Quote(e.Key)
		}
	}
	return "[" + strings.Join(parts, " ") + "]"
}

// Plain reports whether the path adds nothing to fqn.
func (p Path) Plain(fqn string) bool {
	return len(p) == 0 || len(p) == 1 && p[0] == PathKey(fqn)
}

// Validate returns an error unless the path is one of fqn.
func (p Path) Validate(fqn string) error {
	if p.Plain(fqn) {
		return nil
	}
	for _, e := range p {
		if e.List && (e.Index < 0 || e.Index > maxIndex || e.Key != "" || e.Literal) || !e.List && e.Index != 0 || e.Literal && e.Key == "" {
			return fmt.Errorf("%q has the path %v, in which %+v is neither a key nor an index", fqn, p, e)
		}
	}
	if joined := p.FQN(); joined != fqn {
		return fmt.Errorf("%q has the path %v, which is that of %q", fqn, p, joined)
	}
	return nil
}

// path writes where the name is cut, and which parts are indexes: most paths take two or
// three bytes. A path with literals begins with withLiterals, followed by the kind of each
// part. A path that is not of the name is written as an empty path, which no decoder accepts.
func (e *encoder) path(p Path, fqn string) {
	if p.Validate(fqn) != nil {
		e.int(0)
		return
	}
	bits := 1
	for _, el := range p {
		if el.Literal {
			bits = 2
		}
	}
	if bits == 2 {
		e.int(withLiterals)
	}
	last := len(p) - 1
	e.int(len(p)<<bits | p[last].kind())
	for _, el := range p[:last] {
		e.int(len(el.text())<<bits | el.kind())
	}
}

// withLiterals precedes a path that has literals.
const withLiterals = 1

// Kinds of elements on the wire.
const (
	kindKey = iota
	kindIndex
	kindLiteral
)

func (e PathElement) kind() int {
	switch {
	case e.List:
		return kindIndex
	case e.Literal:
		return kindLiteral
	}
	return kindKey
}

// paths reads the paths of the names whose byte in a column has the flag.
func (d *decoder) paths(column []byte, flag byte, names []string) []Path {
	if d.err != nil {
		return nil
	}
	paths := make([]Path, len(names))
	for i, name := range names {
		if column[i]&flag != 0 {
			paths[i] = d.path(name)
		}
	}
	return paths
}

func (d *decoder) path(fqn string) Path {
	v, bits := d.uint(), 1
	if v == withLiterals {
		v, bits = d.uint(), 2
	}
	if v>>bits == 0 || v == 1<<bits { // one key is the name itself
		d.fail("%q: a path of %d keys is redundant", fqn, v>>bits)
	}
	n := d.fits(v>>bits-1, 1) + 1
	if d.err != nil {
		return nil
	}
	p, rest, literals := make(Path, n), fqn, false
	for i := range p {
		part, kind := rest, v&(1<<bits-1)
		if i < n-1 {
			size := d.uint()
			kind = size & (1<<bits - 1)
			if size >>= bits; size >= uint64(len(rest)) || rest[size] != '.' {
				d.fail("%q: no dot ends element %d of the path, of %d bytes", fqn, i, size)
				return nil
			}
			part, rest = rest[:size], rest[size+1:]
		}
		switch kind {
		case kindKey:
			p[i] = PathKey(part)
		case kindIndex:
			index, err := strconv.Atoi(part)
			if err != nil || index < 0 || index > maxIndex || strconv.Itoa(index) != part {
				d.fail("%q: element %d of the path, %q, is no index of a list", fqn, i, part)
				return nil
			}
			p[i] = PathIndex(index)
		case kindLiteral:
			if part == "" {
				d.fail("%q: element %d of the path is a literal without a text", fqn, i)
				return nil
			}
			p[i], literals = PathLiteral(part), true
		default:
			d.fail("%q: element %d of the path is of the unknown kind %d", fqn, i, kind)
			return nil
		}
	}
	if literals != (bits == 2) {
		d.fail("%q: a path without literals is written as a path with literals", fqn)
	}
	return p
}
