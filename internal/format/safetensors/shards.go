package safetensors

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Names of a Hugging Face directory.
const (
	// IndexFile is the name of the file that records which shard holds which tensor.
	IndexFile = "model.safetensors.index.json"
	// SingleFile is the name of the only file of a directory without an index.
	SingleFile = "model.safetensors"
	// Suffix ends the name of every file of the format.
	Suffix = ".safetensors"
)

// ShardFile returns the name of the n-th of a number of files, counted from 1.
func ShardFile(n, of int) string { return fmt.Sprintf("model-%05d-of-%05d%s", n, of, Suffix) }

// Index is a Hugging Face index: the file that holds each tensor of its directory.
//
//	{"metadata": {"total_size": 24},
//	 "weight_map": {"w": "model-00001-of-00002.safetensors"}}
type Index struct {
	TotalSize int64             // of all tensors, in bytes; 0 when absent
	Files     map[string]string // by tensor
}

// MaxIndex bounds the JSON of an index, in bytes.
const MaxIndex = MaxHeader

// Shards returns the names of the files, sorted.
func (x Index) Shards() []string {
	var names []string
	seen := map[string]bool{}
	for _, file := range x.Files {
		if !seen[file] {
			seen[file] = true
			names = append(names, file)
		}
	}
	slices.Sort(names)
	return names
}

// EncodeIndex returns the JSON of an index. Equal indexes give equal bytes.
func EncodeIndex(x Index) ([]byte, error) {
	for name := range x.Files {
		if !utf8.ValidString(name) {
			return nil, fmt.Errorf("encode safetensors index: tensor %q: the name is not valid UTF-8", name)
		}
	}
	type metadata struct {
		TotalSize int64 `json:"total_size"`
	}
	data, err := json.MarshalIndent(struct {
		Metadata  metadata          `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}{metadata{x.TotalSize}, x.Files}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode safetensors index: %w", err)
	}
	return append(data, '\n'), nil
}

// ParseIndex reads the JSON of an index. It trusts nothing: file names cannot lead out of the
// directory of the index. Of the metadata, it reads only total_size.
func ParseIndex(text []byte) (Index, error) {
	x, err := parseIndex(text)
	if err != nil {
		return Index{}, fmt.Errorf("parse safetensors index: %w", err)
	}
	return x, nil
}

func parseIndex(text []byte) (Index, error) {
	if len(text) > MaxIndex {
		return Index{}, fmt.Errorf("%d bytes are above the limit of %d", len(text), MaxIndex)
	}
	if !utf8.Valid(text) {
		return Index{}, errors.New("it is not valid UTF-8")
	}
	d := &decoder{json: json.NewDecoder(bytes.NewReader(text))}
	d.json.UseNumber()
	x := Index{}
	d.object("index", func(key string) {
		switch key {
		case "weight_map":
			x.Files = map[string]string{}
			d.object(key, func(name string) {
				file := d.text(fmt.Sprintf("tensor %q", name))
				if err := validFile(file); err != nil {
					d.fail("tensor %q: %w", name, err)
				}
				x.Files[name] = file
			})
		case "metadata":
			x.TotalSize = d.totalSize()
		default:
			d.skip()
		}
	})
	if d.err == nil {
		if token, err := d.json.Token(); !errors.Is(err, io.EOF) {
			d.fail("after the index: got %v, want nothing", token)
		}
	}
	if d.err == nil && x.Files == nil {
		d.fail("it has no weight_map")
	}
	if d.err != nil {
		return Index{}, fmt.Errorf("offset %d: %w", d.json.InputOffset(), d.err)
	}
	return x, nil
}

// validFile returns an error unless name is the plain name of a safetensors file.
func validFile(name string) error {
	if name == Suffix || !strings.HasSuffix(name, Suffix) || strings.ContainsAny(name, "/\\\x00") || strings.HasPrefix(name, ".") {
		return fmt.Errorf("file %q is not the plain name of a %s file", name, Suffix)
	}
	return nil
}

// totalSize reads the metadata, which may contain other keys.
func (d *decoder) totalSize() int64 {
	size := int64(0)
	d.object("metadata", func(key string) {
		if key != "total_size" {
			d.skip()
			return
		}
		token := d.token()
		number, ok := token.(json.Number)
		if !ok {
			d.fail("total_size: got %v, want a number", token)
			return
		}
		// Some writers make it a float.
		f, err := strconv.ParseFloat(number.String(), 64)
		if err != nil || f < 0 || f >= 1<<62 {
			d.fail("total_size: %s is not a number of bytes", number)
			return
		}
		if size, err = strconv.ParseInt(number.String(), 10, 64); err != nil {
			size = int64(f)
		}
	})
	return size
}

// skip reads one value of any kind.
func (d *decoder) skip() {
	depth := 0
	for d.err == nil {
		switch d.token() {
		case json.Delim('{'), json.Delim('['):
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		if depth <= 0 {
			return
		}
	}
}
