package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/ckptstore/ckptstore/tensor"
	"github.com/ckptstore/ckptstore/trainer"
)

// packed is a storage that keeps the bytes of each rank in one compressed file in
// the checkpoint's directory. The manifest has the digest of each file, which a
// reader checks before it returns any byte.
type packed struct{}

// chunk is one item of a rank, as stored in its file.
type chunk struct {
	FQN   string
	Box   tensor.Box // of a tensor
	DType string     // of a tensor
	Bytes []byte
}

var _ trainer.Storage = packed{}

// Writer returns the writer of one checkpoint. It plans as the store's own writer
// does.
func (packed) Writer(at trainer.Location) trainer.Writer { return packedWriter{at.Writer, at} }

// Reader returns the reader of one checkpoint: the store's own if it has no packed file.
func (packed) Reader(at trainer.Location) trainer.Reader {
	if found, _ := filepath.Glob(fileOf(at.Dir, "*")); len(found) == 0 {
		return at.Reader
	}
	return &packedReader{Reader: at.Reader, at: at, ranks: map[int]map[string]chunk{}}
}

// fileOf returns the path of a rank's file.
func fileOf(dir string, rank any) string {
	return filepath.Join(dir, fmt.Sprintf("rank-%v.packed", rank))
}

// step writes a line to standard error for each step of the protocol.
func (packed) step(name string, ref trainer.Ref) { logf("storage: %s %s", name, ref.Checkpoint) }

type packedWriter struct {
	trainer.Writer
	at trainer.Location
}

// PrepareLocalPlan returns the plan of a rank unchanged.
func (w packedWriter) PrepareLocalPlan(ctx context.Context, local trainer.Local) (trainer.Local, error) {
	packed{}.step("write.PrepareLocalPlan", w.at.Ref)
	return w.Writer.PrepareLocalPlan(ctx, local)
}

// PrepareGlobalPlan returns the plan of all ranks unchanged.
func (w packedWriter) PrepareGlobalPlan(ctx context.Context, layout trainer.Layout) (trainer.Layout, error) {
	packed{}.step("write.PrepareGlobalPlan", w.at.Ref)
	return w.Writer.PrepareGlobalPlan(ctx, layout)
}

// SetUp creates the directory.
func (w packedWriter) SetUp(ctx context.Context, isCoordinator bool) error {
	packed{}.step("write.SetUp", w.at.Ref)
	return w.Writer.SetUp(ctx, isCoordinator)
}

// WriteData compresses the items of a rank into its file. On return the file is durable.
func (w packedWriter) WriteData(ctx context.Context, rank int, items []trainer.Item, src trainer.Source) (trainer.Written, error) {
	packed{}.step("write.WriteData", w.at.Ref)
	chunks := make([]chunk, len(items))
	var out trainer.Written
	for i, item := range items {
		data, err := src.Item(i)
		if err != nil {
			return out, err
		}
		chunks[i] = chunk{FQN: item.Shard.FQN, Box: item.Shard.Box, Bytes: bytes.Clone(data)}
		if !item.Value {
			chunks[i].DType = item.Shard.DType.String()
		}
		out.BytesWritten += item.Bytes
	}
	var packedBytes bytes.Buffer
	z := gzip.NewWriter(&packedBytes)
	if err := errors.Join(gob.NewEncoder(z).Encode(chunks), z.Close(), ctx.Err()); err != nil {
		return out, err
	}
	if err := writeDurably(fileOf(w.at.Dir, rank), packedBytes.Bytes()); err != nil {
		return out, err
	}
	out.Index = trainer.Sum(packedBytes.Bytes())
	out.Files = append(out.Files, trainer.File{Name: filepath.Base(fileOf(w.at.Dir, rank)), Size: int64(packedBytes.Len())})
	return out, nil
}

// Finish checks that every rank's file exists, and commits.
func (w packedWriter) Finish(ctx context.Context, m trainer.Manifest, commit trainer.Commit) (trainer.Receipt, error) {
	packed{}.step("write.Finish", w.at.Ref)
	for _, rank := range m.Ranks {
		if _, err := readChunks(w.at.Dir, rank.Rank, rank.Index); err != nil {
			return trainer.Receipt{}, err
		}
	}
	return w.at.Commit(ctx, m, commit)
}

type packedReader struct {
	trainer.Reader
	at       trainer.Location
	manifest trainer.Manifest

	mu    sync.Mutex
	ranks map[int]map[string]chunk // by the keys of keyOf
}

// ReadMetadata reads the manifest, which is the store's.
func (r *packedReader) ReadMetadata(ctx context.Context) (trainer.Manifest, error) {
	packed{}.step("read.ReadMetadata", r.at.Ref)
	return r.Reader.ReadMetadata(ctx)
}

// SetUp checks that every rank's file exists.
func (r *packedReader) SetUp(ctx context.Context, m trainer.Manifest, isCoordinator bool) error {
	packed{}.step("read.SetUp", r.at.Ref)
	r.manifest = m
	for _, rank := range m.Ranks {
		if _, err := os.Stat(fileOf(r.at.Dir, rank.Rank)); err != nil {
			return err
		}
	}
	return r.Reader.SetUp(ctx, m, isCoordinator)
}

// PrepareLocalPlan returns the reads of a rank unchanged.
func (r *packedReader) PrepareLocalPlan(ctx context.Context, reads []trainer.Read) ([]trainer.Read, error) {
	packed{}.step("read.PrepareLocalPlan", r.at.Ref)
	return r.Reader.PrepareLocalPlan(ctx, reads)
}

// PrepareGlobalPlan returns the reads of all ranks unchanged.
func (r *packedReader) PrepareGlobalPlan(ctx context.Context, reads [][]trainer.Read) ([][]trainer.Read, error) {
	packed{}.step("read.PrepareGlobalPlan", r.at.Ref)
	return r.Reader.PrepareGlobalPlan(ctx, reads)
}

// ReadData copies the wanted part of each chunk.
func (r *packedReader) ReadData(ctx context.Context, wants []trainer.Want, reads []trainer.Read, dst trainer.Destination) (bytesRead int64, err error) {
	packed{}.step("read.ReadData", r.at.Ref)
	for _, read := range reads {
		chunks, n, err := r.rank(read.Rank)
		bytesRead += n
		if err != nil {
			return bytesRead, err
		}
		c, ok := chunks[keyOf(read.FQN, read.Chunk)]
		if !ok {
			return bytesRead, fmt.Errorf("%s: no chunk of %q", fileOf(r.at.Dir, read.Rank), read.FQN)
		}
		want, buf := wants[read.Want], dst.Want(read.Want)
		switch {
		case buf == nil:
		case want.Value:
			copy(buf, c.Bytes)
		default:
			dtype, err := tensor.ParseDType(c.DType)
			if err == nil {
				err = tensor.ConvertRegion(buf, want.Shard.Box, want.Shard.DType, c.Bytes, c.Box, dtype, read.Region)
			}
			if err != nil {
				return bytesRead, fmt.Errorf("%q: %w", read.FQN, err)
			}
		}
	}
	return bytesRead, ctx.Err()
}

// rank returns the chunks of a rank, and how many bytes it read. It reads the
// file on first use.
func (r *packedReader) rank(rank int) (map[string]chunk, int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if chunks := r.ranks[rank]; chunks != nil {
		return chunks, 0, nil
	}
	for _, of := range r.manifest.Ranks {
		if of.Rank != rank {
			continue
		}
		list, err := readChunks(r.at.Dir, rank, of.Index)
		if err != nil {
			return nil, 0, err
		}
		chunks, n := map[string]chunk{}, int64(0)
		for _, c := range list {
			chunks[keyOf(c.FQN, c.Box)] = c
			n += int64(len(c.Bytes))
		}
		r.ranks[rank] = chunks
		return chunks, n, nil
	}
	return nil, 0, fmt.Errorf("checkpoint %s has nothing of rank %d", r.at.Ref.Checkpoint, rank)
}

// keyOf returns the key of a chunk within its rank. A value has no box.
func keyOf(fqn string, box tensor.Box) string { return fqn + " " + box.Key() }

// readChunks reads the file of a rank and compares it with its digest.
func readChunks(dir string, rank int, want trainer.Digest) ([]chunk, error) {
	file := fileOf(dir, rank)
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if got := trainer.Sum(data); got != want {
		return nil, &trainer.CorruptError{File: file, Block: -1, Problem: "digest of the file", Want: want.String(), Got: got.String()}
	}
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var chunks []chunk
	if err := gob.NewDecoder(z).Decode(&chunks); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return chunks, nil
}

// writeDurably writes a file under a temporary name, syncs it, renames it and
// syncs its directory.
func writeDurably(file string, data []byte) error {
	f, err := os.Create(file + ".partial")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), file); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
