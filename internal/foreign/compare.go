package foreign

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Hashed is a file of a directory, with the digest of its bytes.
type Hashed struct {
	Name   string
	Bytes  int64
	SHA256 [sha256.Size]byte
	Also   bool // not of the checkpoint, in [CompareOptions.Also]
}

// CompareOptions are the options of [Compare].
type CompareOptions struct {
	Also     []string          // names of files that need not be of the checkpoint
	Progress func(bytes int64) // called with the number of bytes of tensors and values compared so far; may be nil
}

// DiffersError reports a file that an export of the checkpoint would not have written so.
type DiffersError struct{ Dir, File, Problem string }

// Error names the file and what is wrong with it.
func (e *DiffersError) Error() string {
	return fmt.Sprintf("%s: %s; export the checkpoint again", path.Join(e.Dir, e.File), e.Problem)
}

// ProblemKind returns [problem.Damage].
func (*DiffersError) ProblemKind() problem.Kind { return problem.Damage }

// Compare checks that a directory is an export of a checkpoint: that it has the files that
// [Export] writes, byte for byte, and no other. Each file is read once: the digest is that of
// the compared bytes. It returns a [*DiffersError] for the first difference.
func Compare(ctx context.Context, from data.Reader, files vfs.FS, dir string, o CompareOptions) ([]Hashed, data.Format, error) {
	x := &exporter{ctx: ctx, from: from, fs: files, dir: path.Clean(dir), o: ExportOptions{Progress: o.Progress}}
	out, err := x.compare(o.Also)
	if err != nil {
		return nil, "", fmt.Errorf("compare with %s: %w", dir, err)
	}
	return out, x.o.Format, nil
}

func (x *exporter) compare(also []string) (out []Hashed, err error) {
	if err := checkpoint.ValidatePath(x.dir); err != nil {
		return nil, err
	}
	names, err := x.fs.List(x.dir)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	if x.m, err = x.from.ReadMetadata(x.ctx); err != nil {
		return nil, err
	}
	if err := x.from.SetUp(x.ctx, x.m, true); err != nil {
		return nil, err
	}
	if err := x.identify(names); err != nil {
		return nil, err
	}
	list, err := x.layOut()
	if err != nil {
		return nil, err
	}
	for _, f := range list {
		if !slices.Contains(names, f.name) {
			return nil, x.differs(f.name, "it is missing")
		}
	}
	for _, name := range names {
		of := slices.ContainsFunc(list, func(f outFile) bool { return f.name == name })
		if !of && !slices.Contains(also, name) {
			return nil, x.differs(name, "it is not a file of the checkpoint (--also NAME signs it anyway)")
		}
		if err := x.regular(name); err != nil {
			return nil, err
		}
		if !of {
			list = append(list, outFile{name: name})
		}
	}
	for _, name := range also {
		if !slices.Contains(names, name) {
			return nil, x.differs(name, "it is missing")
		}
	}
	for _, f := range list {
		h, err := x.compareFile(f)
		if err != nil {
			return nil, err
		}
		out = append(out, h)
	}
	return out, nil
}

func (x *exporter) differs(name, format string, args ...any) error {
	return &DiffersError{Dir: x.dir, File: name, Problem: fmt.Sprintf(format, args...)}
}

// regular returns an error for a link or a directory: a verifier would hash other bytes.
func (x *exporter) regular(name string) error {
	stat := func(path string) (fs.FileInfo, error) { return x.fs.Stat(path) }
	if vfs.Root(x.fs) == vfs.Default {
		stat = os.Lstat
	}
	info, err := stat(path.Join(x.dir, name))
	if err == nil && !info.Mode().IsRegular() {
		err = x.differs(name, "it is not a regular file")
	}
	return err
}

// identify finds the format of the directory, and the size at which its files were cut.
func (x *exporter) identify(names []string) error {
	switch {
	case slices.Contains(names, dcp.MetadataFile):
		x.o.Format = data.DCP
	case slices.Contains(names, safetensors.IndexFile):
		x.o.Format = data.HuggingFace
		return x.measure(names)
	case slices.Contains(names, safetensors.SingleFile):
		x.o.Format = data.SafeTensors
	default:
		return problem.Errorf(problem.Invalid, "it has none of %s, %s and %s: give a directory that `ckptstore export --format` wrote",
			dcp.MetadataFile, safetensors.IndexFile, safetensors.SingleFile)
	}
	return nil
}

// measure sets MaxShard so that the tensors are cut as in the index of the directory. The
// largest file of several tensors was within the limit, and every cut was made because the
// next tensor would have exceeded it.
func (x *exporter) measure(names []string) error {
	text, err := readSmall(x.fs, path.Join(x.dir, safetensors.IndexFile), safetensors.MaxIndex)
	if err != nil {
		return err
	}
	index, err := safetensors.ParseIndex(text)
	if err != nil {
		return x.differs(safetensors.IndexFile, "%v", err)
	}
	sizes, tensors := map[string]int64{}, map[string]int{}
	for _, t := range x.m.Layout.Tensors {
		file, known := index.Files[t.FQN]
		if !known {
			return x.differs(safetensors.IndexFile, "it does not have the tensor %q", t.FQN)
		}
		if !slices.Contains(names, file) {
			return x.differs(safetensors.IndexFile, "it places %q in %q, which is missing", t.FQN, file)
		}
		sizes[file] += t.Shape.Volume() * int64(t.DType.Size())
		tensors[file]++
	}
	x.o.MaxShard = 1
	for file, size := range sizes {
		if tensors[file] > 1 {
			x.o.MaxShard = max(x.o.MaxShard, size)
		}
	}
	return nil
}

// compareFile reads a file of the directory next to what an export writes into it. A file
// without parts is not of the checkpoint, and only hashed.
func (x *exporter) compareFile(f outFile) (h Hashed, err error) {
	file, err := x.fs.Open(path.Join(x.dir, f.name))
	if err != nil {
		return h, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	c := &comparing{ctx: x.ctx, file: file, sum: sha256.New(), buf: make([]byte, writeSize)}
	if f.parts == nil {
		h.Also = true
		err = c.rest()
	} else {
		w := bufio.NewWriterSize(c, writeSize)
		for _, p := range f.parts {
			if err = x.part(w, p); err != nil {
				break
			}
		}
		if err == nil {
			err = w.Flush()
		}
		if err == nil {
			err = c.end()
		}
	}
	if c.problem != "" {
		return h, x.differs(f.name, "%s", c.problem)
	}
	if err != nil {
		return h, fmt.Errorf("%s: %w", f.name, err)
	}
	h.Name, h.Bytes, h.SHA256 = f.name, c.at, [sha256.Size]byte(c.sum.Sum(nil))
	return h, nil
}

// comparing compares what is written to it with a file.
type comparing struct {
	ctx     context.Context
	file    io.Reader
	sum     hash.Hash
	buf     []byte
	at      int64
	problem string
}

var errDiffers = errors.New("the file differs")

// Write implements [io.Writer].
func (c *comparing) Write(p []byte) (done int, err error) {
	for len(p) > 0 {
		if err := c.ctx.Err(); err != nil {
			return done, err
		}
		want := p[:min(len(p), len(c.buf))]
		have := c.buf[:len(want)]
		n, err := io.ReadFull(c.file, have)
		c.sum.Write(have[:n])
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			c.problem = fmt.Sprintf("it ends after %d bytes, before the end of the checkpoint's bytes", c.at+int64(n))
			return done, errDiffers
		case err != nil:
			return done, err
		case !bytes.Equal(have, want):
			first := 0
			for have[first] == want[first] {
				first++
			}
			c.problem = fmt.Sprintf("byte %d is not that of the checkpoint", c.at+int64(first))
			return done, errDiffers
		}
		c.at += int64(n)
		done += n
		p = p[n:]
	}
	return done, nil
}

// end checks that the file has no more bytes.
func (c *comparing) end() error {
	n, err := c.file.Read(c.buf[:1])
	if n > 0 {
		c.problem = fmt.Sprintf("it has more than the %d bytes of the checkpoint", c.at)
		return errDiffers
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// rest hashes the rest of the file.
func (c *comparing) rest() error {
	for {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		n, err := c.file.Read(c.buf)
		c.sum.Write(c.buf[:n])
		c.at += int64(n)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
