package storage

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/storage/disk"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Root is the data directory of a store. It is safe for concurrent use, also
// by several processes: everything shared lies in the filesystem.
type Root struct {
	fs     vfs.FS
	dir    string
	stores []string // whose checkpoints these are

	space   sync.Mutex
	pending int64             // bytes that running WriteData calls have yet to write
	keep    func(Usage) int64 // bytes that they leave free; nil: none

	reuse sync.Mutex
	bases []*base // whose indexes are kept, the latest used first

	tell sync.Mutex
	told map[Ref]bool // refs that were told to say
	say  func(Ref)    // nil: nobody is told
}

// Open names the data directory of a store, STORE/data. It touches nothing:
// the directory is made by the first writer, and readers need no permission
// to write.
func Open(fs vfs.FS, dir string) (*Root, error) {
	if fs == nil || dir == "" {
		return nil, errors.New("open data directory: no filesystem or no path given")
	}
	return &Root{fs: fs, dir: dir}, nil
}

// Dir is the directory that was opened.
func (r *Root) Dir() string { return r.dir }

// Ref says where a checkpoint lies: the names of three nested directories,
// which are safe as file names. [RefOf] makes one of any names.
type Ref struct {
	Run        string
	Trial      string
	Checkpoint string
}

// RefOf is where the files of a checkpoint are, given by its ID. Different
// names give different directories.
func RefOf(run, trial, checkpoint string) Ref {
	return Ref{Run: fileName(run), Trial: fileName(trial), Checkpoint: fileName(checkpoint)}
}

// fileName turns any name into that of a file: letters, digits, "-", "_" and
// dots that do not come first stay, every other byte becomes %XX.
func fileName(name string) string {
	var b strings.Builder
	for i := range len(name) {
		switch c := name[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.' && i > 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// String is the path of the checkpoint below the root.
func (r Ref) String() string { return r.Run + "/" + r.Trial + "/" + r.Checkpoint }

// maxName is the length in bytes of the longest name that common filesystems
// take.
const maxName = 255

// Validate reports a name that could lead out of the root or is no name.
func (r Ref) Validate() error {
	for _, part := range []struct{ what, name string }{
		{"run", r.Run}, {"trial", r.Trial}, {"checkpoint", r.Checkpoint},
	} {
		if err := validateName(part.name); err != nil {
			return fmt.Errorf("checkpoint reference %q: %s: %w", r.String(), part.what, err)
		}
	}
	return nil
}

func validateName(name string) error {
	switch {
	case name == "":
		return errors.New("empty name")
	case name == "." || name == "..":
		return fmt.Errorf("name %q is not that of a file", name)
	case strings.ContainsAny(name, "/\x00"):
		return fmt.Errorf("name %q has a separator or NUL", name)
	case len(name) > maxName:
		return fmt.Errorf("name of %d bytes, at most %d are allowed", len(name), maxName)
	}
	return nil
}

// path is the directory of ref, or the path of a file in it.
func (r *Root) path(ref Ref, file ...string) string {
	return r.fs.PathJoin(append([]string{r.dir, ref.Run, ref.Trial, ref.Checkpoint}, file...)...)
}

// makeDirs makes the directory of ref with its parents and makes their names
// durable.
func (r *Root) makeDirs(ref Ref) error {
	dir := r.path(ref)
	if err := r.fs.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make directory %s: %w", dir, disk.NoSpace(err))
	}
	return r.syncDirs(ref)
}

// syncDirs syncs the directory of ref and every one above it, up to the one
// that holds the root: a name is durable only when its directory is.
func (r *Root) syncDirs(ref Ref) error {
	dir := r.path(ref)
	for range 4 {
		if err := r.syncDir(dir); err != nil {
			return err
		}
		dir = r.fs.PathDir(dir)
	}
	return r.syncDir(dir)
}

func (r *Root) syncDir(dir string) error { return disk.SyncDir(r.fs, dir) }

// readFile is the content of a small file.
func (r *Root) readFile(path string) ([]byte, error) { return disk.ReadFile(r.fs, path) }

// writeTemp writes data to path under a temporary name and syncs it. The
// caller gives it its name. On an error nothing stays behind.
func (r *Root) writeTemp(path string, data []byte) (temp string, err error) {
	temp = path + tempSuffix
	f, err := r.fs.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return "", fmt.Errorf("create %s: %w", temp, disk.NoSpace(err))
	}
	_, err = f.Write(slices.Clone(data)) // a file may change what it is given
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		r.discard(temp)
		return "", fmt.Errorf("write %s: %w", temp, disk.NoSpace(err))
	}
	return temp, nil
}

// discard removes a temporary file after an error, so that a full disk does
// not stay full. The error that led here is the one to report; what cannot be
// removed goes with its directory.
func (r *Root) discard(temp string) { _ = r.fs.Remove(temp) }

// Usage is the room on a filesystem, in bytes.
type Usage struct {
	Free uint64 // that this process may still write
	Size uint64 // that and what is used
}

// Share is percent of the size.
func (u Usage) Share(percent uint64) uint64 { return u.Size / 100 * percent }

// Usage is the room below the root, as the filesystem tells it. It is
// [vfs.ErrUnsupported] where the filesystem does not tell.
func (r *Root) Usage() (Usage, error) {
	// The root and its parent may not have been made yet.
	for dir := r.dir; ; {
		usage, err := r.fs.GetDiskUsage(dir)
		parent := r.fs.PathDir(dir)
		if errors.Is(err, fs.ErrNotExist) && parent != dir {
			dir = parent
			continue
		}
		if err != nil {
			return Usage{}, fmt.Errorf("free space of %s: %w", dir, err)
		}
		return Usage{Free: usage.AvailBytes, Size: usage.UsedBytes + usage.AvailBytes}, nil
	}
}

// Free is what of the [Root.Usage] is free.
func (r *Root) Free() (bytes uint64, err error) {
	u, err := r.Usage()
	return u.Free, err
}

// KeepFree makes WriteData refuse what would leave less than bytes free: a
// disk that saves have filled has no room for the log that says so.
func (r *Root) KeepFree(bytes int64) {
	r.KeepFreeOf(func(Usage) int64 { return bytes })
}

// KeepFreeOf is [Root.KeepFree] with bytes that depend on the disk.
func (r *Root) KeepFreeOf(keep func(Usage) (bytes int64)) {
	r.space.Lock()
	defer r.space.Unlock()
	r.keep = keep
}

// reserve claims need bytes of the free space, together with what other
// writers have yet to write. The claim is given back by [Root.release].
func (r *Root) reserve(need int64) error {
	r.space.Lock()
	defer r.space.Unlock()
	usage, err := r.Usage()
	keep := int64(0)
	if err == nil && r.keep != nil {
		keep = r.keep(usage)
	}
	switch {
	case errors.Is(err, vfs.ErrUnsupported):
		// Then the disk itself is the check: a full one fails the write.
	case err != nil:
		return err
	case uint64(need+r.pending+keep) > usage.Free:
		return &NoSpaceError{Dir: r.dir, Need: need, Pending: r.pending, Keep: keep, Free: usage.Free}
	}
	r.pending += need
	return nil
}

func (r *Root) release(bytes int64) {
	r.space.Lock()
	defer r.space.Unlock()
	r.pending -= bytes
}

// OnUnverified sets who is told, once for each checkpoint, that bytes of
// adopted files are read whose sums are not learned yet. It is called before
// any reader is made; say must not block.
func (r *Root) OnUnverified(say func(Ref)) { r.say, r.told = say, map[Ref]bool{} }

func (r *Root) unverified(ref Ref) {
	if r.say == nil {
		return
	}
	r.tell.Lock()
	defer r.tell.Unlock()
	if !r.told[ref] {
		r.told[ref] = true
		r.say(ref)
	}
}
