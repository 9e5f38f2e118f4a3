package dcp

import (
	"errors"
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/tensor"
)

// ReadMetadata reads a .metadata file. Errors are of type [*FormatError]. It needs memory in
// proportion to data, and shares none with it. Names whose path is one object in the file
// share one slice, which must not be changed. Paths of names that are not in the checkpoint
// are omitted.
func ReadMetadata(data []byte) (Metadata, error) {
	root, err := unpickle(metadataDialect, data, MetadataFile, 0)
	if err != nil {
		return Metadata{}, fmt.Errorf("read metadata: %w", err)
	}
	r := &metadataReader{stored: map[archiveKey]Location{}, shared: map[*any][]any{}, budget: newBudget(len(data)), last: root}
	m, err := r.metadata(root)
	if err != nil {
		return Metadata{}, fmt.Errorf("read metadata: %w", at(MetadataFile, r.offset(), err))
	}
	return m, nil
}

// metadataReader converts the object graph to structures. The graph may share and repeat
// objects, so each loop below ends at a repeated key, at a stored archive that is used twice,
// or at a limit.
type metadataReader struct {
	stored map[archiveKey]Location // archives that no chunk or value has taken yet
	shared map[*any][]any          // paths, by the tuple's first element
	budget
	last any // object that is read, for messages
}

// archiveKey identifies an archive in storage_data.
type archiveKey struct{ fqn, offsets string }

// noOffset is the key of an archive without offsets, which is a value's. Empty offsets, a
// scalar's, have another key.
const noOffset = "none"

func (r *metadataReader) offset() int64 {
	if c, ok := r.last.(*call); ok {
		return int64(c.pos)
	}
	return 0
}

func (r *metadataReader) metadata(root any) (Metadata, error) {
	f, _, err := fields(root, classMetadata, false,
		"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
	if err != nil {
		return Metadata{}, err
	}
	var m Metadata
	if err := r.storage(f[2]); err != nil {
		return m, fmt.Errorf("storage_data: %w", err)
	}
	paths, err := r.paths(f[1])
	if err != nil {
		return m, fmt.Errorf("planner_data: %w", err)
	}
	if err := r.stateDict(f[0], paths, &m); err != nil {
		return m, fmt.Errorf("state_dict_metadata: %w", err)
	}
	r.last = root
	for key := range r.stored {
		return m, fmt.Errorf("storage_data has %s, which state_dict_metadata has not", quote(key.fqn))
	}
	if m.SaveID, err = r.storageMeta(f[3]); err != nil {
		return m, fmt.Errorf("storage_meta: %w", err)
	}
	if m.Version, err = optional(f[4]); err != nil {
		return m, fmt.Errorf("version: %w", err)
	}
	other := map[string]bool{}
	for _, t := range m.Tensors {
		if t.opaque {
			other[t.FQN] = true
		}
	}
	return m.Opaque(other)
}

func optional(v any) (string, error) {
	switch v := v.(type) {
	case nil, absent:
		return "", nil
	case string:
		if len(v) > maxName {
			return "", fmt.Errorf("text of %d bytes", len(v))
		}
		return v, nil
	}
	return "", fmt.Errorf("want a str, got %s", kind(v))
}

func fqnOf(v any) (string, error) {
	name, ok := v.(string)
	switch {
	case !ok:
		return "", fmt.Errorf("want a name, got %s", kind(v))
	case name == "":
		return "", errors.New("empty name: give the tensor or value a key, then save again")
	case len(name) > maxFQN:
		return "", fmt.Errorf("name of %d bytes, at most %d are allowed: %s", len(name), maxFQN, quote(name))
	}
	return name, nil
}

// paths reads planner_data.
func (r *metadataReader) paths(v any) (map[string][]any, error) {
	if v == nil || v == any(absent{}) {
		return nil, nil
	}
	d, ok := v.(*dict)
	if !ok {
		return nil, fmt.Errorf("want a dict, got %s", kind(v))
	}
	out := make(map[string][]any, len(d.pairs)/2)
	for i := 0; i < len(d.pairs); i += 2 {
		fqn, err := fqnOf(d.pairs[i])
		if err != nil {
			return nil, err
		}
		t, ok := d.pairs[i+1].(tuple)
		if !ok || len(t) == 0 || len(t) > maxPath {
			return nil, fmt.Errorf("path of %s is %s, want a tuple of 1 to %d keys", quote(fqn), kind(d.pairs[i+1]), maxPath)
		}
		if _, twice := out[fqn]; twice {
			return nil, fmt.Errorf("%s occurs twice", quote(fqn))
		}
		path, err := r.path(t)
		if err != nil {
			return nil, fmt.Errorf("path of %s %w", quote(fqn), err)
		}
		out[fqn] = path
	}
	return out, nil
}

// path converts a tuple of keys, once for all names that share it.
func (r *metadataReader) path(t tuple) ([]any, error) {
	if path, ok := r.shared[&t[0]]; ok {
		return path, nil
	}
	path, text := make([]any, len(t)), len(t)-1 // the dots between the keys
	for j, key := range t {
		switch n := key.(type) {
		case string:
			path[j] = key
			text += len(n)
		case int64:
			path[j] = int(n)
			if int64(int(n)) != n || n < 0 {
				return nil, fmt.Errorf("has the index %d", n)
			}
		default:
			return nil, fmt.Errorf("has %s as a key", kind(key))
		}
	}
	if text > maxFQN {
		return nil, fmt.Errorf("has keys of %d bytes in all, at most %d are allowed", text, maxFQN)
	}
	r.shared[&t[0]] = path
	return path, nil
}

// integers copies a torch.Size.
func (r *metadataReader) integers(v any) ([]int64, error) {
	t, err := sizeOf(v)
	if err != nil {
		return nil, err
	}
	if err := r.spend(8 * len(t)); err != nil {
		return nil, err
	}
	return numbers(t)
}

// keyOf returns the key of the archive of a chunk at offsets.
func keyOf(fqn string, offsets []int64) archiveKey {
	return archiveKey{fqn, tensor.Box{Offsets: offsets}.Key()}
}

func (r *metadataReader) stateDict(v any, paths map[string][]any, m *Metadata) error {
	d, ok := v.(*dict)
	if !ok {
		return fmt.Errorf("want a dict, got %s", kind(v))
	}
	seen := make(map[string]struct{}, len(d.pairs)/2)
	for i := 0; i < len(d.pairs); i += 2 {
		fqn, err := fqnOf(d.pairs[i])
		if err != nil {
			return err
		}
		if _, twice := seen[fqn]; twice {
			return fmt.Errorf("%s occurs twice", quote(fqn))
		}
		seen[fqn] = struct{}{}
		r.last = d.pairs[i+1]
		if c, err := object(d.pairs[i+1], classBytes); err == nil {
			if state, ok := c.state.(*dict); c.state != nil && (!ok || len(state.pairs) > 0) {
				return fmt.Errorf("%s: BytesStorageMetadata has fields", quote(fqn))
			}
			where, ok := r.take(archiveKey{fqn, noOffset})
			if !ok {
				return fmt.Errorf("%s has no archive in storage_data", quote(fqn))
			}
			m.Values = append(m.Values, Value{FQN: fqn, Path: paths[fqn], Where: where})
			continue
		}
		t, err := r.tensor(fqn, d.pairs[i+1])
		if err != nil {
			return fmt.Errorf("tensor %s: %w", quote(fqn), err)
		}
		t.FQN, t.Path = fqn, paths[fqn]
		m.Tensors = append(m.Tensors, t)
	}
	return nil
}

func (r *metadataReader) tensor(fqn string, v any) (Tensor, error) {
	f, _, err := fields(v, classTensor, false, "properties", "size", "chunks")
	if err != nil {
		return Tensor{}, err
	}
	var t Tensor
	if t.DType, t.RequiresGrad, err = properties(f[0]); errors.As(err, new(*otherDTypeError)) {
		t.opaque = true
	} else if err != nil {
		return t, err
	}
	shape, err := r.integers(f[1])
	if err != nil {
		return t, fmt.Errorf("size: %w", err)
	}
	t.Shape = shape
	if t.opaque {
		err = t.Shape.Validate()
	} else {
		err = checkShape(t.DType, t.Shape)
	}
	if err != nil {
		return t, err
	}
	chunks, ok := f[2].(*list)
	if !ok {
		return t, fmt.Errorf("chunks is %s", kind(f[2]))
	}
	for i, v := range chunks.items {
		f, c, err := fields(v, classChunk, false, "offsets", "sizes")
		if err != nil {
			return t, fmt.Errorf("chunk %d: %w", i, err)
		}
		r.last = c
		var b tensor.Box
		if b.Offsets, err = r.integers(f[0]); err != nil {
			return t, fmt.Errorf("chunk %d: offsets: %w", i, err)
		}
		if b.Sizes, err = r.integers(f[1]); err != nil {
			return t, fmt.Errorf("chunk %d: sizes: %w", i, err)
		}
		if err := b.Validate(t.Shape); err != nil {
			return t, fmt.Errorf("chunk %d: %w", i, err)
		}
		// Each chunk has the tensor's name in the index that is made from it.
		if err := r.spend(len(fqn)); err != nil {
			return t, fmt.Errorf("chunk %d: %w", i, err)
		}
		where, ok := r.take(keyOf(fqn, b.Offsets))
		if !ok {
			return t, fmt.Errorf("chunk %d: no archive in storage_data is left for offsets %v", i, b.Offsets)
		}
		t.Chunks = append(t.Chunks, Chunk{Box: b, Where: where})
	}
	return t, nil
}

// checkShape returns an error for a shape whose bytes cannot be counted.
func checkShape(dtype tensor.DType, shape tensor.Shape) error {
	if err := shape.Validate(); err != nil {
		return err
	}
	if shape.Volume() > math.MaxInt64/int64(dtype.Size()) {
		return fmt.Errorf("shape %v needs more than 2^63 bytes", shape)
	}
	return nil
}

// storageMeta returns the save_id. The other fields describe the saving process.
func (r *metadataReader) storageMeta(v any) (string, error) {
	if v == nil || v == any(absent{}) {
		return "", nil
	}
	f, _, err := fields(v, classStorageMeta, true, "save_id")
	if err != nil {
		return "", err
	}
	return optional(f[0])
}
