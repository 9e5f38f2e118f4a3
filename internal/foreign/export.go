package foreign

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"path"
	"strings"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// DefaultMaxShard is the size in bytes above which an export of the format [data.HuggingFace]
// begins another file.
const DefaultMaxShard = 5_000_000_000

// ExportOptions are the options of [Export].
type ExportOptions struct {
	Format   data.Format
	MaxShard int64                           // in bytes, of [data.HuggingFace]; 0 for [DefaultMaxShard]
	Replace  bool                            // replace an existing export
	Keep     *data.Root                      // a store whose adopted files, and whose own files, must not be replaced; may be nil
	Stale    func(dir string, replaced bool) // called for leftovers of killed exports next to the directory: their files, or what they replaced; may be nil
	Progress func(bytes int64)               // called with the number of bytes of tensors and values written so far; may be nil
}

// Exported reports what was written.
type Exported struct {
	Path    string      `json:"path"` // of the directory
	Format  data.Format `json:"format"`
	Files   int         `json:"files"`
	Tensors int         `json:"tensors"`
	Values  int         `json:"values"`
	Bytes   int64       `json:"bytes"` // of tensors and values
	LeftOut []LeftOut   `json:"left_out"`
}

// LeftOut is a value that the format cannot hold.
type LeftOut struct {
	FQN    string `json:"fqn"`
	Rank   int    `json:"rank"`
	Bytes  int64  `json:"bytes"`
	Reason string `json:"reason"`
}

// UnfitError lists tensors whose element type the format lacks. Nothing was written.
type UnfitError struct {
	Format  data.Format
	Tensors []string // with their types
}

// Error reports the first tensors and the next step.
func (e *UnfitError) Error() string {
	shown, more := e.Tensors, ""
	if len(shown) > 5 {
		shown, more = shown[:5], fmt.Sprintf(" and %d more", len(e.Tensors)-5)
	}
	return fmt.Sprintf("the format %s has no type for %s%s; export with --format dcp", e.Format, strings.Join(shown, ", "), more)
}

// Export writes a checkpoint in the format of another program into the absolute path dir of a
// filesystem. It holds one tensor or value in memory at a time. It writes and syncs
// everything next to dir first, so that dir is either complete or absent: an error, or a
// crash, leaves at most a directory with ".partial-" in its name.
func Export(ctx context.Context, from data.Reader, files vfs.FS, dir string, o ExportOptions) (Exported, error) {
	x := &exporter{ctx: ctx, from: from, fs: files, dir: path.Clean(dir), o: o, out: Exported{Path: dir, Format: o.Format, LeftOut: []LeftOut{}}}
	if err := x.run(); err != nil {
		return Exported{}, fmt.Errorf("export to %s: %w", dir, err)
	}
	return x.out, nil
}

// writeSize is the number of bytes of one write.
const writeSize = 1 << 20

// exporter is the state of one export.
type exporter struct {
	ctx    context.Context
	from   data.Reader
	fs     vfs.FS
	dir    string
	o      ExportOptions
	m      checkpoint.Manifest
	out    Exported
	buf    []byte
	done   int64
	suffix string   // of the directories next to dir
	made   []string // directories above dir that were made, from the bottom
}

// outFile is a file to write, as consecutive parts.
type outFile struct {
	name  string
	parts []part
}

// part is a run of known bytes followed by bytes to read.
type part struct {
	before []byte
	want   checkpoint.Want
	reads  []checkpoint.Read
	bytes  int64                   // that are read
	after  func(crc uint32) []byte // of the CRC-32 of those; may be nil
	value  *checkpoint.Value       // instead of all that: its archive, of so many bytes
}

func (x *exporter) run() (err error) {
	if err := checkpoint.ValidatePath(x.dir); err != nil {
		return err
	}
	if x.dir, err = real(x.fs, x.dir); err != nil {
		return err
	}
	if x.m, err = x.from.ReadMetadata(x.ctx); err != nil {
		return err
	}
	if err := x.from.SetUp(x.ctx, x.m, true); err != nil {
		return err
	}
	if err := x.spare(); err != nil {
		return err
	}
	there, err := x.look(x.dir)
	if err != nil {
		return err
	}
	if err := x.stale(); err != nil {
		return err
	}
	list, err := x.layOut()
	if err != nil {
		return err
	}
	if err := x.parents(); err != nil {
		return err
	}
	partial, lock, err := x.claim()
	if err != nil {
		return err
	}
	defer working.Delete(partial)
	if err = x.write(partial, list); err == nil {
		err = x.unlock(partial, lock)
	} else if lock != nil {
		err = errors.Join(err, lock.Close())
	}
	if err == nil {
		err = disk.SyncDir(x.fs, partial)
	}
	if err != nil {
		// Files that cannot be removed have a name that no reader takes for the export.
		return errors.Join(err, x.fs.RemoveAll(partial))
	}
	return x.place(partial, there)
}

// layOut returns the files to write.
func (x *exporter) layOut() ([]outFile, error) {
	switch x.o.Format {
	case data.DCP:
		return x.dcp()
	case data.SafeTensors, data.HuggingFace:
		return x.safetensors()
	}
	return nil, fmt.Errorf("unknown format %q: dcp, safetensors or hf", x.o.Format)
}

// write makes the files durable, but not their names.
func (x *exporter) write(partial string, list []outFile) error {
	if usage, err := x.fs.GetDiskUsage(path.Dir(x.dir)); err == nil {
		if need := x.m.Layout.Bytes(); uint64(need) > usage.AvailBytes {
			return fmt.Errorf("no space in %s: %d bytes are needed and %d are free: %w", path.Dir(x.dir), need, usage.AvailBytes, syscall.ENOSPC)
		}
	}
	for _, f := range list {
		if err := x.file(path.Join(partial, f.name), f); err != nil {
			return fmt.Errorf("%s: %w", f.name, disk.NoSpace(err))
		}
		x.out.Files++
	}
	return nil
}

func (x *exporter) file(name string, f outFile) (err error) {
	to, err := x.fs.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(to, writeSize)
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
	if p.value != nil {
		return x.value(w, *p.value, p.bytes)
	}
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
		if _, err := x.from.ReadData(x.ctx, []checkpoint.Want{p.want}, p.reads, buffer(buf)); err != nil {
			return err
		}
		if p.after != nil {
			crc = crc32.ChecksumIEEE(buf)
		}
		if _, err := w.Write(buf); err != nil {
			return err
		}
		x.progress(p.bytes)
	}
	if p.after == nil {
		return nil
	}
	_, err := w.Write(p.after(crc))
	return err
}

// value writes an archive, which is encoded a second time after the layout, so that the
// values are never in memory all at once.
func (x *exporter) value(w *bufio.Writer, v checkpoint.Value, size int64) error {
	archive, err := x.archive(v)
	if err != nil {
		return err
	}
	if int64(len(archive)) != size {
		return fmt.Errorf("value %q of rank %d has changed while it was exported: its archive has %d bytes, and had %d", v.FQN, v.Rank, len(archive), size)
	}
	if _, err := w.Write(archive); err != nil {
		return err
	}
	x.progress(v.Bytes)
	return nil
}

func (x *exporter) progress(bytes int64) {
	x.done += bytes
	if x.o.Progress != nil {
		x.o.Progress(x.done)
	}
}

// buffer is the destination of a single want.
type buffer []byte

// Want implements [data.Destination].
func (b buffer) Want(int) []byte { return b }
