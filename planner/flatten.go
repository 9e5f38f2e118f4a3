package planner

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Mapping is a mapping of a state dict with the order of its keys, which a
// map[string]any has not. Keys become strings as Python writes them: strings
// stay, 3 becomes "3", true "True" and nil "None"; others are refused.
type Mapping []Entry

// Entry is one key of a [Mapping].
type Entry struct{ Key, Value any }

// Leaf is one tensor or value of a flat state dict.
type Leaf struct {
	FQN   string
	Path  checkpoint.Path // never empty
	Value any
}

// Flatten lists the tensors and values of a nested state dict under the names
// that PyTorch gives them. Mappings (Mapping, or map[string]any in the order
// of its keys) are always descended into; a list ([]any) only if a tensor is
// in it, or a container that is descended into itself. Everything else is a
// leaf: so is a list of numbers, one value of all of them, and a tuple, for
// which any other Go type stands. An empty mapping has no leaf and so no trace
// in a checkpoint, as in PyTorch.
//
// tensor reports whether something is a tensor. The error joins all names
// that two leaves have, each with both paths, and all keys that no string
// stands for.
func Flatten(state Mapping, tensor func(any) bool) ([]Leaf, error) {
	f := flattener{tensor: tensor, seen: map[string]checkpoint.Path{}}
	f.descend(nil, state)
	if err := errors.Join(f.problems...); err != nil {
		return nil, fmt.Errorf("flatten the state dict: %w", err)
	}
	return f.leaves, nil
}

type flattener struct {
	tensor   func(any) bool
	leaves   []Leaf
	seen     map[string]checkpoint.Path
	problems []error
}

func (f *flattener) visit(path checkpoint.Path, value any) {
	if !f.leaf(value) {
		f.descend(path, value)
		return
	}
	l := Leaf{FQN: path.FQN(), Path: path, Value: value}
	other, twice := f.seen[l.FQN]
	switch {
	case twice:
		f.problems = append(f.problems, fmt.Errorf("%q is the name of both %v and %v: rename one of them", l.FQN, other, path))
	case l.FQN == "":
		f.problems = append(f.problems, fmt.Errorf("%v has an empty name: rename its key", path))
	}
	f.seen[l.FQN] = path
	f.leaves = append(f.leaves, l)
}

// leaf reports whether a value is saved as one thing.
func (f *flattener) leaf(value any) bool {
	switch v := value.(type) {
	case Mapping, map[string]any:
		return false
	case []any:
		return !slices.ContainsFunc(v, func(entry any) bool { return f.tensor(entry) || !f.leaf(entry) })
	}
	return true
}

func (f *flattener) descend(path checkpoint.Path, value any) {
	path = slices.Clip(path) // so that each child's is its own
	switch v := value.(type) {
	case Mapping:
		for _, e := range v {
			key, err := keyString(e.Key)
			if err != nil {
				f.problems = append(f.problems, fmt.Errorf("%v: %w", path, err))
				continue
			}
			f.visit(append(path, checkpoint.PathKey(key)), e.Value)
		}
	case map[string]any:
		keys := make([]string, 0, len(v))
		for key := range v {
			keys = append(keys, key)
		}
		slices.Sort(keys)
		for _, key := range keys {
			f.visit(append(path, checkpoint.PathKey(key)), v[key])
		}
	case []any:
		for i, e := range v {
			f.visit(append(path, checkpoint.PathIndex(i)), e)
		}
	}
}

func keyString(key any) (string, error) {
	switch k := key.(type) {
	case string:
		return k, nil
	case int:
		return strconv.Itoa(k), nil
	case int64:
		return strconv.FormatInt(k, 10), nil
	case bool:
		if k {
			return "True", nil
		}
		return "False", nil
	case nil:
		return "None", nil
	}
	return "", fmt.Errorf("a key of type %T has no name: use a string", key)
}

// maxHoles bounds the entries that [Unflatten] makes up in one list.
const maxHoles = 1 << 16

// Unflatten is the inverse of [Flatten]: every container comes back, mappings
// as [Mapping] with the keys in the order of the leaves, as strings. An index
// that no leaf has is nil in its list, as in PyTorch: an empty mapping was
// there, or a part of the state dict that was not saved. The error joins all
// paths that contradict each other.
func Unflatten(leaves []Leaf) (Mapping, error) {
	root, problems := &node{}, []error(nil)
	for _, l := range leaves {
		if err := root.set(l); err != nil {
			problems = append(problems, err)
		}
	}
	var state Mapping
	if len(problems) == 0 && len(leaves) > 0 {
		value, err := root.value(nil)
		switch m, ok := value.(Mapping); {
		case err != nil:
			problems = append(problems, err)
		case !ok:
			problems = append(problems, fmt.Errorf("%v begins with an index: a state dict is a mapping", leaves[0].Path))
		default:
			state = m
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("unflatten %d tensors and values: %w", len(leaves), err)
	}
	return state, nil
}

// node is one place in a state dict: a leaf, or a container if it has
// children.
type node struct {
	leaf     *Leaf
	children []*child
	at       map[checkpoint.PathElement]*child
}

type child struct {
	element checkpoint.PathElement
	node
}

func (n *node) set(l Leaf) error {
	if len(l.Path) == 0 {
		return fmt.Errorf("%q has no path", l.FQN)
	}
	if err := l.Path.Validate(l.FQN); err != nil {
		return err
	}
	for i, e := range l.Path {
		if n.leaf != nil {
			return fmt.Errorf("%v is in %v, which is a value itself", l.Path, n.leaf.Path)
		}
		if len(n.children) > 0 && n.children[0].element.List != e.List {
			return fmt.Errorf("%v has a list and a mapping in one place, %v", l.Path, l.Path[:i])
		}
		c := n.at[e]
		if c == nil {
			c = &child{element: e}
			if n.at == nil {
				n.at = map[checkpoint.PathElement]*child{}
			}
			n.at[e] = c
			n.children = append(n.children, c)
		}
		n = &c.node
	}
	switch {
	case n.leaf != nil:
		return fmt.Errorf("%v is there twice", l.Path)
	case len(n.children) > 0:
		return fmt.Errorf("%v is a value and holds others", l.Path)
	}
	n.leaf = &l
	return nil
}

func (n *node) value(path checkpoint.Path) (any, error) {
	if n.leaf != nil {
		return n.leaf.Value, nil
	}
	var list []any
	if n.children[0].element.List {
		last := slices.MaxFunc(n.children, func(a, b *child) int { return cmp.Compare(a.element.Index, b.element.Index) }).element.Index
		if last-len(n.children) >= maxHoles {
			return nil, fmt.Errorf("%v is a list of %d entries, of which only %d are there", path, last+1, len(n.children))
		}
		list = make([]any, last+1)
	}
	var mapping Mapping
	for _, c := range n.children {
		v, err := c.value(append(slices.Clip(path), c.element))
		if err != nil {
			return nil, err
		}
		if list != nil {
			list[c.element.Index] = v
		} else {
			mapping = append(mapping, Entry{Key: c.element.Key, Value: v})
		}
	}
	if list != nil {
		return list, nil
	}
	return mapping, nil
}
