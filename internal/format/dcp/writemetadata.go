package dcp

import (
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"

	"github.com/ckptstore/ckptstore/tensor"
)

// WriteMetadata returns the .metadata file of m, a pickle of protocol 4. Equal metadata give
// equal bytes. It accepts every result of [ReadMetadata]. Other metadata need distinct names,
// valid locations, and chunks within their tensor's shape, at distinct offsets. If no tensor
// or value has a path, there is no planner_data.
func WriteMetadata(m Metadata) ([]byte, error) {
	w := &metadataWriter{pickler: newPickler(4), names: map[string]struct{}{}}
	if err := w.check(m); err != nil {
		return nil, fmt.Errorf("write metadata: %w", err)
	}
	w.metadata(m)
	return w.b, nil
}

type metadataWriter struct {
	*pickler
	names map[string]struct{}
	paths bool
}

func (w *metadataWriter) check(m Metadata) error {
	if !utf8.ValidString(m.Version) || !utf8.ValidString(m.SaveID) || len(m.Version) > maxName || len(m.SaveID) > maxName {
		return errors.New("version or save ID is not a short text in UTF-8")
	}
	for _, v := range m.Values {
		if err := w.name(v.FQN, v.Path, v.Where); err != nil {
			return err
		}
	}
	for _, t := range m.Tensors {
		if err := w.name(t.FQN, t.Path, Location{File: "none"}); err != nil {
			return err
		}
		if !t.DType.Valid() {
			return fmt.Errorf("tensor %s: invalid dtype %d", quote(t.FQN), uint8(t.DType))
		}
		if err := checkShape(t.DType, t.Shape); err != nil {
			return fmt.Errorf("tensor %s: %w", quote(t.FQN), err)
		}
		seen := make(map[string]struct{}, len(t.Chunks))
		for i, c := range t.Chunks {
			if err := c.Box.Validate(t.Shape); err != nil {
				return fmt.Errorf("tensor %s: chunk %d: %w", quote(t.FQN), i, err)
			}
			if err := checkLocation(c.Where); err != nil {
				return fmt.Errorf("tensor %s: chunk %d: %w", quote(t.FQN), i, err)
			}
			key := tensor.Box{Offsets: c.Box.Offsets}.Key()
			if _, twice := seen[key]; twice {
				return fmt.Errorf("tensor %s: chunk %d: offsets %v occur twice", quote(t.FQN), i, c.Box.Offsets)
			}
			seen[key] = struct{}{}
		}
	}
	return nil
}

func (w *metadataWriter) name(fqn string, path []any, where Location) error {
	if fqn == "" || len(fqn) > maxFQN || !utf8.ValidString(fqn) {
		return fmt.Errorf("%s is not a name of 1 to %d bytes of UTF-8", quote(fqn), maxFQN)
	}
	if _, twice := w.names[fqn]; twice {
		return fmt.Errorf("name %s occurs twice", quote(fqn))
	}
	w.names[fqn] = struct{}{}
	if err := checkLocation(where); err != nil {
		return fmt.Errorf("%s: %w", quote(fqn), err)
	}
	if path == nil {
		return nil
	}
	w.paths = true
	if len(path) == 0 || len(path) > maxPath {
		return fmt.Errorf("path of %s has %d keys, want 1 to %d", quote(fqn), len(path), maxPath)
	}
	text := len(path) - 1
	for _, key := range path {
		switch key := key.(type) {
		case int:
			if key < 0 {
				return fmt.Errorf("path of %s has the index %d", quote(fqn), key)
			}
		case string:
			if !utf8.ValidString(key) {
				return fmt.Errorf("path of %s has the key %s", quote(fqn), quote(key))
			}
			text += len(key)
		default:
			return fmt.Errorf("path of %s has a key of type %T, want string or int", quote(fqn), key)
		}
	}
	if text > maxFQN {
		return fmt.Errorf("path of %s has keys of %d bytes in all, at most %d are allowed", quote(fqn), text, maxFQN)
	}
	return nil
}

func checkLocation(where Location) error {
	if !utf8.ValidString(where.File) {
		return fmt.Errorf("file name %s is not UTF-8", quote(where.File))
	}
	return where.Validate()
}

// begin and end enclose the fields of an object.
func (w *metadataWriter) begin(class global) {
	w.global(class)
	w.op(opEmptyTuple, opNewObj, opEmptyDict, opMark)
}

func (w *metadataWriter) end() { w.op(opSetItems, opBuild) }

// section is a part of the file with its own memo. Names and offsets are in
// state_dict_metadata and in storage_data. Written once for both, a damaged byte would change
// both and go unnoticed.
type section int

const (
	described section = iota // state_dict_metadata, planner_data
	stored                   // storage_data
)

type memoKey struct {
	section section
	size    bool // text is that of a torch.Size
	text    string
}

// fqn writes a name, once for its section.
func (w *metadataWriter) fqn(s section, name string) {
	key := memoKey{section: s, text: name}
	if w.get(key) {
		return
	}
	w.once(name)
	w.put(key)
}

// size writes a torch.Size, once for its section: most sizes are repeated.
func (w *metadataWriter) size(s section, ns []int64) {
	var text []byte
	for _, n := range ns {
		text = append(strconv.AppendInt(text, n, 10), ',')
	}
	key := memoKey{section: s, size: true, text: string(text)}
	if w.get(key) {
		return
	}
	w.global(classSize)
	w.ints(ns)
	w.op(opTuple1, opReduce)
	w.put(key)
}

func (w *metadataWriter) metadata(m Metadata) {
	w.begin(classMetadata)
	w.text("state_dict_metadata")
	w.op(opEmptyDict, opMark)
	for _, t := range m.Tensors {
		w.fqn(described, t.FQN)
		w.tensor(t)
	}
	for _, v := range m.Values {
		w.fqn(described, v.FQN)
		w.global(classBytes)
		w.op(opEmptyTuple, opNewObj)
	}
	w.op(opSetItems)
	w.text("planner_data")
	w.planner(m)
	w.text("storage_data")
	w.op(opEmptyDict, opMark)
	for _, v := range m.Values {
		w.index(v.FQN, nil, -1)
		w.location(v.Where)
	}
	for _, t := range m.Tensors {
		for i, c := range t.Chunks {
			w.index(t.FQN, c.Box.Offsets, i)
			w.location(c.Where)
		}
	}
	w.op(opSetItems)
	if m.SaveID != "" {
		w.text("storage_meta")
		w.begin(classStorageMeta)
		w.text("checkpoint_id")
		w.op(opNone)
		w.text("save_id")
		w.text(m.SaveID)
		w.text("load_id")
		w.op(opNone)
		w.text("modules")
		w.op(opEmptyList)
		w.end()
	}
	if m.Version != "" {
		w.text("version")
		w.text(m.Version)
	}
	w.end()
	w.op(opStop)
}

func (w *metadataWriter) tensor(t Tensor) {
	w.begin(classTensor)
	w.text("properties")
	w.global(classProperties)
	w.op(opEmptyTuple, opNewObj, opMark)
	w.global(global{"torch", t.DType.String()})
	w.global(classLayout)
	w.text("torch.strided")
	w.op(opTuple1, opReduce)
	w.bool(t.RequiresGrad)
	w.global(classMemFormat)
	w.int(0) // contiguous
	w.op(opTuple1, opReduce, opNewFalse, opTuple, opBuild)
	w.text("size")
	w.size(described, t.Shape)
	w.text("chunks")
	w.op(opEmptyList, opMark)
	for _, c := range t.Chunks {
		w.begin(classChunk)
		w.text("offsets")
		w.size(described, c.Box.Offsets)
		w.text("sizes")
		w.size(described, c.Box.Sizes)
		w.end()
	}
	w.op(opAppends)
	w.end()
}

func (w *metadataWriter) planner(m Metadata) {
	if !w.paths {
		w.op(opNone)
		return
	}
	w.op(opEmptyDict, opMark)
	for _, t := range m.Tensors {
		w.path(t.FQN, t.Path)
	}
	for _, v := range m.Values {
		w.path(v.FQN, v.Path)
	}
	w.op(opSetItems)
}

func (w *metadataWriter) path(fqn string, path []any) {
	if path == nil {
		return
	}
	w.fqn(described, fqn)
	w.tuple(len(path))
	for _, key := range path {
		switch key := key.(type) {
		case int:
			w.int(int64(key))
		case string:
			w.text(key)
		}
	}
	w.tupleOf(len(path))
}

// index writes the key of storage_data. The position among the tensor's chunks is a hint for
// PyTorch's look-up. A value, whose hint is negative, has neither offsets nor hint.
func (w *metadataWriter) index(fqn string, offsets []int64, hint int) {
	w.begin(classIndex)
	w.text("fqn")
	w.fqn(stored, fqn)
	w.text("index")
	if hint < 0 {
		w.op(opNone)
	} else {
		w.int(int64(hint))
		w.text("offset")
		w.size(stored, offsets)
	}
	w.end()
}

func (w *metadataWriter) location(where Location) {
	w.begin(classStorageInfo)
	w.text("relative_path")
	w.text(where.File)
	w.text("offset")
	w.int(where.Offset)
	w.text("length")
	w.int(where.Length)
	w.end()
}
