package plan

import (
	"fmt"
	"strconv"
	"strings"
)

// PathElement is one step of a [Path]: the key of a mapping, or the index of
// a list. Make one with [Key] or [Index].
type PathElement struct {
	Key   string // "" where List
	Index int    // 0 where not List
	List  bool
}

// Key is the step into a mapping.
func Key(key string) PathElement { return PathElement{Key: key} }

// Index is the step into a list, from 0.
func Index(index int) PathElement { return PathElement{Index: index, List: true} }

// text is the element's part of an FQN.
func (e PathElement) text() string {
	if e.List {
		return strconv.Itoa(e.Index)
	}
	return e.Key
}

// Path is where something was in the state dict before that was flattened:
// the entry that PyTorch keeps in planner_data. Its elements joined by dots
// are the FQN. No path at all means the one of that FQN alone.
type Path []PathElement

// FQN joins the elements by dots.
func (p Path) FQN() string {
	parts := make([]string, len(p))
	for i, e := range p {
		parts[i] = e.text()
	}
	return strings.Join(parts, ".")
}

// String shows keys quoted and indexes bare, such as ["optim" "state" 3].
func (p Path) String() string {
	parts := make([]string, len(p))
	for i, e := range p {
		if parts[i] = strconv.Quote(e.Key); e.List {
			parts[i] = strconv.Itoa(e.Index)
		}
	}
	return "[" + strings.Join(parts, " ") + "]"
}

// Plain reports whether the path says no more than fqn does.
func (p Path) Plain(fqn string) bool {
	return len(p) == 0 || len(p) == 1 && !p[0].List && p[0].Key == fqn
}

// Validate reports a path that is not one of fqn.
func (p Path) Validate(fqn string) error {
	if p.Plain(fqn) {
		return nil
	}
	for _, e := range p {
		if e.List && (e.Index < 0 || e.Index > maxIndex || e.Key != "") || !e.List && e.Index != 0 {
			return fmt.Errorf("%q has the path %v, in which %+v is neither a key nor an index", fqn, p, e)
		}
	}
	if joined := p.FQN(); joined != fqn {
		return fmt.Errorf("%q has the path %v, which is that of %q", fqn, p, joined)
	}
	return nil
}

// path writes where the name is cut, and which parts are indexes: most paths
// take two or three bytes. One that is not of the name is written as a path
// of nothing, which no decoder takes.
func (e *encoder) path(p Path, fqn string) {
	if p.Validate(fqn) != nil {
		e.int(0)
		return
	}
	flag := func(el PathElement) int {
		if el.List {
			return 1
		}
		return 0
	}
	last := len(p) - 1
	e.int(len(p)<<1 | flag(p[last]))
	for _, el := range p[:last] {
		e.int(len(el.text())<<1 | flag(el))
	}
}

// paths reads those of the names whose byte in a column has the flag.
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
	v := d.uint()
	if v < 3 {
		d.fail("%q: a path of %d keys says nothing", fqn, v>>1)
	}
	n := d.fits(v>>1-1, 1) + 1
	if d.err != nil {
		return nil
	}
	p, rest := make(Path, n), fqn
	for i := range p {
		part, list := rest, v&1 != 0
		if i < n-1 {
			size := d.uint()
			list = size&1 != 0
			if size >>= 1; size >= uint64(len(rest)) || rest[size] != '.' {
				d.fail("%q: no dot ends element %d of the path, of %d bytes", fqn, i, size)
				return nil
			}
			part, rest = rest[:size], rest[size+1:]
		}
		if p[i] = Key(part); list {
			index, err := strconv.Atoi(part)
			if err != nil || index < 0 || index > maxIndex || strconv.Itoa(index) != part {
				d.fail("%q: element %d of the path, %q, is no index of a list", fqn, i, part)
				return nil
			}
			p[i] = Index(index)
		}
	}
	return p
}
