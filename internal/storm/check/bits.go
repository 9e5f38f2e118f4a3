package check

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/storm/content"
)

// chunk is one entry of a safetensors file.
type chunk struct {
	dtype string
	shape []int64
	data  []byte
}

// readSafetensors parses a file by the specification of the format: a little-endian
// length, a JSON header, and the bytes that it points into.
func readSafetensors(path string) (map[string]chunk, int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, 0, err
	}
	if len(data) < 8 {
		return nil, 0, errors.New("no header")
	}
	n := binary.LittleEndian.Uint64(data)
	if n > uint64(len(data)-8) { //nolint:gosec // 8 or more
		return nil, 0, fmt.Errorf("a header of %d bytes in a file of %d", n, len(data))
	}
	var header map[string]json.RawMessage
	if err := json.Unmarshal(data[8:8+n], &header); err != nil {
		return nil, 0, err
	}
	body := data[8+n:]
	chunks := map[string]chunk{}
	for name, text := range header {
		if name == "__metadata__" {
			continue
		}
		var entry struct {
			DType   string   `json:"dtype"`
			Shape   []int64  `json:"shape"`
			Offsets [2]int64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(text, &entry); err != nil {
			return nil, 0, fmt.Errorf("%s: %w", name, err)
		}
		from, to := entry.Offsets[0], entry.Offsets[1]
		if from < 0 || to < from || to > int64(len(body)) {
			return nil, 0, fmt.Errorf("%s: bytes %d to %d of %d", name, from, to, len(body))
		}
		chunks[name] = chunk{entry.DType, entry.Shape, body[from:to]}
	}
	return chunks, int64(len(data)), nil
}

// compareFiles reads every safetensors file of a checkpoint's directory and lists
// differences from what its ranks saved. Tensors that a rank wrote must be in its own
// file; tensors that it had saved before may be in a linked file.
func compareFiles(dir string, l checkpoint) (n int64, wrong []string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, []string{err.Error()}
	}
	own, linked := map[int]map[string]chunk{}, []map[string]chunk{}
	for _, e := range entries {
		name := e.Name()
		isLink := strings.HasSuffix(name, ".link")
		if !isLink && filepath.Ext(name) != ".safetensors" {
			continue
		}
		chunks, size, err := readSafetensors(filepath.Join(dir, name))
		n += size
		var rank int
		switch {
		case err != nil:
			wrong = append(wrong, fmt.Sprintf("%s: %v", name, err))
		case isLink:
			linked = append(linked, chunks)
		default:
			if _, err := fmt.Sscanf(name, "r%05d.safetensors", &rank); err != nil {
				wrong = append(wrong, fmt.Sprintf("%s: of no rank", name))
			}
			own[rank] = chunks
		}
	}
	replicas := map[string]bool{}
	for rank := range l.World {
		want := content.Of(l.Run, rank, l.World, l.Step)
		for _, t := range want.Tensors {
			if t.Replica {
				if !replicas[t.FQN] {
					replicas[t.FQN] = true
					wrong = append(wrong, anywhere(own, linked, t)...)
				}
				continue
			}
			wrong = append(wrong, compareShard(rank, own[rank], linked, t)...)
		}
		for _, v := range want.Values {
			if v.PerRank {
				wrong = append(wrong, compareValue(rank, own[rank], v)...)
			} else if rank == 0 {
				wrong = append(wrong, sharedValue(own, v)...)
			}
		}
	}
	return n, wrong
}

// shardKey returns the name of a shard in a file. A whole tensor keeps its own name.
func shardKey(t content.Tensor) string {
	if slices.Equal(t.Global, t.Sizes) {
		return t.FQN
	}
	text := make([]string, len(t.Offsets))
	for i, o := range t.Offsets {
		text[i] = fmt.Sprint(o)
	}
	return t.FQN + "@" + strings.Join(text, ",")
}

func compareShard(rank int, own map[string]chunk, linked []map[string]chunk, t content.Tensor) []string {
	name := shardKey(t)
	if got, ok := own[name]; ok {
		if d := differs(got, t); d != "" {
			return []string{fmt.Sprintf("rank %d's file: %s: %s", rank, name, d)}
		}
		return nil
	}
	for _, chunks := range linked {
		if got, ok := chunks[name]; ok && differs(got, t) == "" {
			return nil
		}
	}
	return []string{fmt.Sprintf("rank %d: %s is neither in its file nor, with these bytes, in one of %d linked files", rank, name, len(linked))}
}

// anywhere requires a replica in one of the files.
func anywhere(own map[int]map[string]chunk, linked []map[string]chunk, t content.Tensor) (wrong []string) {
	found := false
	for rank, chunks := range own {
		if got, ok := chunks[t.FQN]; ok {
			found = true
			if d := differs(got, t); d != "" {
				wrong = append(wrong, fmt.Sprintf("rank %d's file: %s: %s", rank, t.FQN, d))
			}
		}
	}
	for _, chunks := range linked {
		if got, ok := chunks[t.FQN]; ok && differs(got, t) == "" {
			found = true
		}
	}
	if !found {
		wrong = append(wrong, t.FQN+" is in no file")
	}
	return wrong
}

func compareValue(rank int, own map[string]chunk, v content.Value) []string {
	got, ok := own[v.FQN]
	switch {
	case !ok:
		return []string{fmt.Sprintf("rank %d's file has no %s", rank, v.FQN)}
	case !bytes.Equal(got.data, v.Data):
		return []string{fmt.Sprintf("rank %d's file: value %s: other bytes", rank, v.FQN)}
	}
	return nil
}

func sharedValue(own map[int]map[string]chunk, v content.Value) (wrong []string) {
	found := false
	for rank, chunks := range own {
		if got, ok := chunks[v.FQN]; ok {
			found = true
			wrong = append(wrong, compareValue(rank, map[string]chunk{v.FQN: got}, v)...)
		}
	}
	if !found {
		wrong = append(wrong, v.FQN+" is in no file")
	}
	return wrong
}

// differs describes how a chunk differs from a shard.
func differs(got chunk, want content.Tensor) string {
	switch {
	case got.dtype != want.Safetensors:
		return fmt.Sprintf("it is %s, want %s", got.dtype, want.Safetensors)
	case !slices.Equal(got.shape, want.Sizes):
		return fmt.Sprintf("its shape is %v, want %v", got.shape, want.Sizes)
	case !bytes.Equal(got.data, want.Data):
		return difference(got.data, want.Data)
	}
	return ""
}

func difference(got, want []byte) string {
	if len(got) != len(want) {
		return fmt.Sprintf("%d bytes, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			return fmt.Sprintf("byte %d is %#02x, want %#02x", i, got[i], want[i])
		}
	}
	return "equal"
}

// export makes the store export the checkpoint, and compares the result: whole tensors,
// and each rank's own value.
func (c *checker) export(ctx context.Context, l checkpoint, to string) (n int64, wrong []string, err error) {
	if err := os.RemoveAll(to); err != nil {
		return 0, nil, err
	}
	if _, err := c.command(ctx, "export", l.ref(), to, "--format", "safetensors", "-q"); err != nil {
		return 0, []string{err.Error()}, ctx.Err()
	}
	chunks, n, err := readSafetensors(filepath.Join(to, "model.safetensors"))
	if err != nil {
		return 0, []string{fmt.Sprintf("export: %v", err)}, nil
	}
	whole := map[string]content.Tensor{}
	for rank := range l.World {
		for _, t := range content.Of(l.Run, rank, l.World, l.Step).Tensors {
			if rank == 0 || t.Replica {
				t.Sizes = t.Global
				whole[t.FQN] = t
				continue
			}
			all := whole[t.FQN]
			all.Data = append(all.Data, t.Data...) // ranks have consecutive rows
			whole[t.FQN] = all
		}
	}
	for name, want := range whole {
		if d := differs(chunks[name], want); d != "" {
			wrong = append(wrong, fmt.Sprintf("export: %s: %s", name, d))
		}
	}
	if len(chunks) != len(whole) {
		wrong = append(wrong, fmt.Sprintf("export: %d tensors, want %d", len(chunks), len(whole)))
	}
	last := l.World - 1
	value, err := c.command(ctx, "cat", l.ref(), "rng", "--rank", fmt.Sprint(last))
	if err != nil {
		return n, append(wrong, err.Error()), ctx.Err()
	}
	if want := content.Of(l.Run, last, l.World, l.Step).Values[0].Data; !bytes.Equal(value, want) {
		wrong = append(wrong, fmt.Sprintf("cat: rng of rank %d: %s", last, difference(value, want)))
	}
	return n, wrong, nil
}
