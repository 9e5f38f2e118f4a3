package storage

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage/dcp"
	"github.com/ckptstore/ckptstore/storage/safetensors"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// DefaultMaxShard is the size in bytes above which an export of the format
// [HuggingFace] begins another file.
const DefaultMaxShard = 5_000_000_000

// ExportOptions say how to export.
type ExportOptions struct {
	Format   Format
	MaxShard int64             // in bytes, of [HuggingFace]; 0 for [DefaultMaxShard]
	Replace  bool              // an export that is there already is replaced
	Progress func(bytes int64) // told how many bytes of tensors and values are written so far; may be nil
}

// Exported says what was written.
type Exported struct {
	Path    string    `json:"path"` // of the directory
	Format  Format    `json:"format"`
	Files   int       `json:"files"`
	Tensors int       `json:"tensors"`
	Values  int       `json:"values"`
	Bytes   int64     `json:"bytes"` // of tensors and values
	LeftOut []LeftOut `json:"left_out"`
}

// LeftOut is a value that the format cannot hold.
type LeftOut struct {
	FQN    string `json:"fqn"`
	Rank   int    `json:"rank"`
	Bytes  int64  `json:"bytes"`
	Reason string `json:"reason"`
}

// OccupiedError says that there is something where an export should go.
type OccupiedError struct {
	Dir   string
	Holds string // a file in it
	Alien bool   // no export writes such a file
}

// Error says what is there and the next step.
func (e *OccupiedError) Error() string {
	if e.Alien {
		return fmt.Sprintf("%s holds %q, which no export has written: choose another directory", e.Dir, e.Holds)
	}
	return fmt.Sprintf("%s is not empty (it holds %q): choose another directory, or replace what is there with --force", e.Dir, e.Holds)
}

// UnfitError lists tensors that a format has no element type for. Nothing was
// written.
type UnfitError struct {
	Format  Format
	Tensors []string // with their types
}

// Error names the first tensors and the next step.
func (e *UnfitError) Error() string {
	shown, more := e.Tensors, ""
	if len(shown) > 5 {
		shown, more = shown[:5], fmt.Sprintf(" and %d more", len(e.Tensors)-5)
	}
	return fmt.Sprintf("the format %s has no type for %s%s: export with --format dcp", e.Format, strings.Join(shown, ", "), more)
}

// Export writes a checkpoint in the format of another program into the
// absolute path dir of a filesystem. It holds one tensor in memory at a time.
// All is written and synced beside dir first, so that dir is either whole or
// not there: an error, or a crash, leaves at most a directory with ".partial-"
// in its name.
func Export(ctx context.Context, from Reader, files vfs.FS, dir string, o ExportOptions) (Exported, error) {
	x := &exporter{ctx: ctx, from: from, fs: files, dir: path.Clean(dir), o: o, out: Exported{Path: dir, Format: o.Format, LeftOut: []LeftOut{}}}
	if err := x.run(); err != nil {
		return Exported{}, fmt.Errorf("export to %s: %w", dir, err)
	}
	return x.out, nil
}

// exporter is the state of one export.
type exporter struct {
	ctx  context.Context
	from Reader
	fs   vfs.FS
	dir  string
	o    ExportOptions
	m    plan.Manifest
	out  Exported
	buf  []byte
	done int64
	made []string // directories above dir that were made, from the bottom
}

// outFile is a file to write, as parts that follow each other.
type outFile struct {
	name  string
	parts []part
}

// part is bytes that are known, and bytes that are read.
type part struct {
	before []byte
	want   plan.Want
	reads  []plan.Read
	bytes  int64                   // that are read
	after  func(crc uint32) []byte // of the CRC-32 of those; may be nil
}

func (x *exporter) run() (err error) {
	if err := validatePath(x.dir); err != nil {
		return err
	}
	if x.m, err = x.from.ReadMetadata(x.ctx); err != nil {
		return err
	}
	if err := x.from.SetUp(x.ctx, x.m, true); err != nil {
		return err
	}
	var list []outFile
	var last func() ([]outFile, error) // files that are known when the others are laid out
	switch x.o.Format {
	case DCP:
		list, last, err = x.dcp()
	case SafeTensors, HuggingFace:
		list, err = x.safetensors()
	default:
		err = fmt.Errorf("unknown format %q: dcp, safetensors or hf", x.o.Format)
	}
	if err == nil && last != nil {
		var more []outFile
		more, err = last()
		list = append(list, more...)
	}
	if err != nil {
		return err
	}
	occupied, err := x.look()
	if err != nil {
		return err
	}
	partial := fmt.Sprintf("%s.partial-%d", x.dir, os.Getpid())
	if err := x.write(partial, list); err != nil {
		// What cannot be removed has a name that nobody takes for the export.
		return errors.Join(err, x.fs.RemoveAll(partial))
	}
	return x.place(partial, occupied)
}

// look reports whether something is at dir that is to be replaced.
func (x *exporter) look() (occupied bool, err error) {
	names, err := x.fs.List(x.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, x.parents()
	case errors.Is(err, syscall.ENOTDIR):
		return false, fmt.Errorf("it is a file: choose another directory")
	case err != nil:
		return false, err
	}
	for _, name := range names {
		known := name == dcp.MetadataFile || name == safetensors.IndexFile ||
			strings.HasSuffix(name, safetensors.Suffix) || strings.HasSuffix(name, ".distcp")
		if !known {
			return false, &OccupiedError{Dir: x.dir, Holds: name, Alien: true}
		}
	}
	if len(names) > 0 && !x.o.Replace {
		slices.Sort(names)
		return false, &OccupiedError{Dir: x.dir, Holds: names[0]}
	}
	return true, nil
}

// parents makes the directories above dir.
func (x *exporter) parents() error {
	for dir := path.Dir(x.dir); ; dir = path.Dir(dir) {
		_, err := x.fs.Stat(dir)
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == "/" {
			return err
		}
		x.made = append(x.made, dir)
	}
	return noSpace(x.fs.MkdirAll(path.Dir(x.dir), 0o755))
}

// write makes the files durable in a directory of their own.
func (x *exporter) write(partial string, list []outFile) error {
	if usage, err := x.fs.GetDiskUsage(path.Dir(x.dir)); err == nil {
		if need := x.m.Layout.Bytes(); uint64(need) > usage.AvailBytes {
			return fmt.Errorf("no space in %s: %d bytes are needed and %d are free: %w", path.Dir(x.dir), need, usage.AvailBytes, syscall.ENOSPC)
		}
	}
	if err := x.fs.RemoveAll(partial); err != nil {
		return err
	}
	if err := x.fs.MkdirAll(partial, 0o755); err != nil {
		return noSpace(err)
	}
	for _, f := range list {
		if err := x.file(path.Join(partial, f.name), f); err != nil {
			return fmt.Errorf("%s: %w", f.name, noSpace(err))
		}
		x.out.Files++
	}
	r := Root{fs: x.fs}
	return r.syncDir(partial)
}

func (x *exporter) file(name string, f outFile) (err error) {
	to, err := x.fs.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(to, pieceSize)
	for _, p := range f.parts {
		if err = x.part(w, p); err != nil {
			break
		}
	}
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = to.Sync()
	}
	return errors.Join(err, to.Close())
}

func (x *exporter) part(w *bufio.Writer, p part) error {
	if _, err := w.Write(p.before); err != nil {
		return err
	}
	if int64(cap(x.buf)) < p.bytes {
		x.buf = nil // the old one goes first
		x.buf = make([]byte, p.bytes)
	}
	buf := x.buf[:p.bytes]
	crc := uint32(0)
	if len(p.reads) > 0 {
		if _, err := x.from.ReadData(x.ctx, []plan.Want{p.want}, p.reads, oneBuffer(buf)); err != nil {
			return err
		}
		if p.after != nil {
			crc = crc32.ChecksumIEEE(buf)
		}
		if _, err := w.Write(buf); err != nil {
			return err
		}
		x.done += p.bytes
		if x.o.Progress != nil {
			x.o.Progress(x.done)
		}
	}
	if p.after == nil {
		return nil
	}
	_, err := w.Write(p.after(crc))
	return err
}

// place gives the whole directory its name.
func (x *exporter) place(partial string, occupied bool) error {
	r := Root{fs: x.fs}
	parent := path.Dir(x.dir)
	old := fmt.Sprintf("%s.replaced-%d", x.dir, os.Getpid())
	if occupied {
		if err := x.fs.Rename(x.dir, old); err != nil {
			return errors.Join(err, x.fs.RemoveAll(partial))
		}
	}
	if err := x.fs.Rename(partial, x.dir); err != nil {
		if occupied {
			err = errors.Join(err, x.fs.Rename(old, x.dir))
		}
		return errors.Join(err, x.fs.RemoveAll(partial))
	}
	for _, dir := range append([]string{parent}, parentsOf(x.made)...) {
		if err := r.syncDir(dir); err != nil {
			return err
		}
	}
	if !occupied {
		return nil
	}
	if err := x.fs.RemoveAll(old); err != nil {
		return fmt.Errorf("the export is whole, but what it replaced could not be removed: %w", err)
	}
	return nil
}

// parentsOf is the directory that holds each.
func parentsOf(dirs []string) []string {
	out := make([]string, len(dirs))
	for i, dir := range dirs {
		out[i] = path.Dir(dir)
	}
	return out
}
