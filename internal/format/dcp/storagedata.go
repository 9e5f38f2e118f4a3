package dcp

import (
	"errors"
	"fmt"
)

// storage reads storage_data: the archive of each chunk and value.
func (r *metadataReader) storage(v any) error {
	d, ok := v.(*dict)
	if !ok {
		return fmt.Errorf("want a dict, got %s", kind(v))
	}
	for i := 0; i < len(d.pairs); i += 2 {
		r.last = d.pairs[i]
		f, _, err := fields(d.pairs[i], classIndex, false, "fqn", "offset", "index")
		if err != nil {
			return err
		}
		fqn, err := fqnOf(f[0])
		if err != nil {
			return err
		}
		key := archiveKey{fqn, noOffset}
		if f[1] != nil && f[1] != any(absent{}) {
			offsets, err := r.integers(f[1])
			if err != nil {
				return fmt.Errorf("%s: offset: %w", quote(fqn), err)
			}
			key = keyOf(fqn, offsets)
		}
		// index is a hint for PyTorch's look-up; the key decides.
		switch f[2].(type) {
		case nil, absent, int64:
		default:
			return fmt.Errorf("%s: index is %s", quote(fqn), kind(f[2]))
		}
		r.last = d.pairs[i+1]
		where, err := location(d.pairs[i+1])
		if err != nil {
			return fmt.Errorf("%s: %w", quote(fqn), err)
		}
		if _, twice := r.stored[key]; twice {
			return fmt.Errorf("%s occurs twice with the same offset", quote(fqn))
		}
		r.stored[key] = where
	}
	return nil
}

func location(v any) (Location, error) {
	f, _, err := fields(v, classStorageInfo, false, "relative_path", "offset", "length", "transform_descriptors")
	if err != nil {
		return Location{}, err
	}
	file, ok := f[0].(string)
	offset, ok1 := f[1].(int64)
	length, ok2 := f[2].(int64)
	if !ok || !ok1 || !ok2 {
		return Location{}, errors.New("_StorageInfo has not relative_path, offset and length")
	}
	switch t := f[3].(type) {
	case nil, absent:
	case *list:
		if len(t.items) > 0 {
			name, _ := t.items[0].(string)
			return Location{}, fmt.Errorf("written through the transform %s: only untransformed files are read; save again without extensions", quote(name))
		}
	case tuple:
		if len(t) > 0 {
			name, _ := t[0].(string)
			return Location{}, fmt.Errorf("written through the transform %s: only untransformed files are read; save again without extensions", quote(name))
		}
	default:
		return Location{}, fmt.Errorf("transform_descriptors is %s", kind(t))
	}
	where := Location{File: file, Offset: offset, Length: length}
	return where, where.Validate()
}

// take returns an archive, and removes it: each has one chunk or value.
func (r *metadataReader) take(key archiveKey) (Location, bool) {
	where, ok := r.stored[key]
	delete(r.stored, key)
	return where, ok
}
