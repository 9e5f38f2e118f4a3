package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"unicode/utf8"
)

// Encode returns the header of a file that holds tensors in the given order, with the length
// in front and padded to a multiple of [Align] bytes: the data begins right after it. Equal
// arguments give equal bytes. The tensors must fill the data without holes and have distinct
// names in valid UTF-8.
func Encode(metadata map[string]string, tensors []Tensor) ([]byte, error) {
	if err := (Header{Tensors: tensors}).validate(); err != nil {
		return nil, fmt.Errorf("encode safetensors header: %w", err)
	}
	var b bytes.Buffer
	b.Write(make([]byte, prefix))
	b.WriteByte('{')
	if metadata != nil {
		if err := writeMetadata(&b, metadata); err != nil {
			return nil, fmt.Errorf("encode safetensors header: %w", err)
		}
	}
	names := make(map[string]struct{}, len(tensors))
	for i, t := range tensors {
		if _, taken := names[t.Name]; taken || t.Name == MetadataKey {
			return nil, fmt.Errorf("encode safetensors header: name %q is taken", t.Name)
		}
		names[t.Name] = struct{}{}
		if i > 0 || metadata != nil {
			b.WriteByte(',')
		}
		if err := writeTensor(&b, t); err != nil {
			return nil, fmt.Errorf("encode safetensors header: %w", err)
		}
	}
	b.WriteByte('}')
	if pad := b.Len() % Align; pad > 0 {
		b.Write(bytes.Repeat([]byte{' '}, Align-pad))
	}
	n := b.Len() - prefix
	if n > MaxHeader {
		return nil, fmt.Errorf("encode safetensors header: %d bytes for %d tensors, at most %d are allowed", n, len(tensors), MaxHeader)
	}
	header := b.Bytes()
	binary.LittleEndian.PutUint64(header, uint64(n))
	return header, nil
}

func writeMetadata(b *bytes.Buffer, metadata map[string]string) error {
	b.WriteString(`"` + MetadataKey + `":{`)
	for i, key := range slices.Sorted(maps.Keys(metadata)) {
		if i > 0 {
			b.WriteByte(',')
		}
		if err := writeString(b, key); err != nil {
			return fmt.Errorf("metadata: %w", err)
		}
		b.WriteByte(':')
		if err := writeString(b, metadata[key]); err != nil {
			return fmt.Errorf("metadata %q: %w", key, err)
		}
	}
	b.WriteByte('}')
	return nil
}

func writeTensor(b *bytes.Buffer, t Tensor) error {
	if err := writeString(b, t.Name); err != nil {
		return fmt.Errorf("name of a tensor: %w", err)
	}
	b.WriteString(`:{"dtype":"` + string(t.Type) + `","shape":[`)
	for d, n := range t.Shape {
		if d > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(n, 10))
	}
	fmt.Fprintf(b, `],"data_offsets":[%d,%d]}`, t.Start, t.End)
	return nil
}

// writeString refuses text that JSON would silently change: two names that differ only in
// invalid bytes would become one.
func writeString(b *bytes.Buffer, s string) error {
	if !utf8.ValidString(s) {
		return fmt.Errorf("%q is not valid UTF-8", s)
	}
	quoted, err := json.Marshal(s)
	if err != nil {
		return err
	}
	b.Write(quoted)
	return nil
}
