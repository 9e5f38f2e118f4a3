package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Target is a committed checkpoint.
type Target struct {
	Ref      checkpoint.Ref
	Manifest checkpoint.Digest // as recorded in the log
}

// ChunkSource provides bytes of chunks from outside the files of a store, such as staging
// slots in shared memory.
type ChunkSource interface {
	// Chunk returns the bytes with a digest, of the same dtype and size as like, and their
	// origin; nil if it has none. Calls must not run at the same time. The caller does not
	// keep the bytes.
	Chunk(ctx context.Context, like checkpoint.Item, digest checkpoint.Digest) (data []byte, from string, err error)
}

// RepairedFile is a data file that was rewritten, or linked to an undamaged one.
type RepairedFile struct {
	Ref    checkpoint.Ref
	File   string          // name in its directory
	Chunks []RepairedChunk // whose bytes were damaged
	Links  []string        // paths of the same file in other directories, also repaired
	From   string          // path of an undamaged copy that was linked in; empty if the file was rewritten
}

// RepairedChunk is a chunk whose bytes were restored.
type RepairedChunk struct {
	FQN   string
	Chunk string // box; empty for a value
	Bytes int64
	From  string // path of the file, or name of the staging slot, that had the bytes
}

// Unrepaired is damage that remains.
type Unrepaired struct {
	Ref    checkpoint.Ref
	File   string
	FQN    string // empty for the file as a whole
	Chunk  string
	Reason string // with the next step
}

// Repairs reports the result of [Root.Repair]. Left holds also the remaining damage in
// repaired files.
type Repairs struct {
	Files []RepairedFile
	Left  []Unrepaired
}

// Repair restores the bytes of damaged chunks from any chunk with the same digest, dtype and
// size: in the same file, in another file or checkpoint of all, or in one of the sources.
// damaged are the files with findings of a verification, by checkpoint; all is every
// committed checkpoint.
//
// Each file is rewritten under a temporary name, compared with the digests, synced, read
// again and renamed. Directories with a link to the damaged file, also those that a save
// makes meanwhile, then get a link to the new one. After a crash each directory has one file
// or the other, and the same call continues. Manifests, indexes, receipts and adopted files
// are left unchanged.
//
// The caller must not run two repairs of the same data at a time: each would take the other's
// files for damaged ones.
func (r *Root) Repair(ctx context.Context, damaged map[checkpoint.Ref][]string, all []Target, sources ...ChunkSource) (Repairs, error) {
	damaged = inPlace(damaged)
	p := &repair{root: r, all: all, sources: sources, done: map[holder]bool{}, poor: map[string]map[donorAt]bool{}}
	if err := p.survey(ctx, damaged); err != nil {
		return p.out, fmt.Errorf("repair: %w", err)
	}
	refs := make([]checkpoint.Ref, 0, len(damaged))
	for ref := range damaged {
		refs = append(refs, ref)
	}
	slices.SortFunc(refs, func(a, b checkpoint.Ref) int { return strings.Compare(a.String(), b.String()) })
	for _, ref := range refs {
		names := slices.Clone(damaged[ref])
		slices.Sort(names)
		for _, name := range slices.Compact(names) {
			err := errors.Join(ctx.Err(), ref.Validate(), checkpoint.ValidateName(name))
			if err == nil {
				err = p.file(ctx, ref, name)
			}
			if err != nil {
				return p.out, fmt.Errorf("repair %s of checkpoint %s: %w", name, ref, err)
			}
		}
	}
	return p.out, nil
}

// inPlace returns the damaged files by the checkpoint in whose directory they lie: a finding
// may be of a file of another checkpoint.
func inPlace(damaged map[checkpoint.Ref][]string) map[checkpoint.Ref][]string {
	out := map[checkpoint.Ref][]string{}
	for ref, names := range damaged {
		for _, name := range names {
			in := ref
			if of := strings.Split(name, "/"); len(of) == 4 {
				in, name = checkpoint.Ref{Run: of[0], Trial: of[1], Checkpoint: of[2]}, of[3]
			}
			out[in] = append(out[in], name)
		}
	}
	return out
}

// repair is the state of one call of Repair.
type repair struct {
	root    *Root
	all     []Target
	sources []ChunkSource
	known   map[string]*knowledge          // of the damaged files, by their link name
	places  map[reuse.Content][]donorPlace // of their contents
	holders map[string][]holder            // of the damaged files, at the beginning of the call
	done    map[holder]bool                // names that were repaired together with another name
	poor    map[string]map[donorAt]bool    // places, by path, whose bytes are wrong
	out     Repairs
}

func (p *repair) left(ref checkpoint.Ref, file string, e *checkpoint.Entry, format string, args ...any) {
	u := Unrepaired{Ref: ref, File: file, Reason: fmt.Sprintf(format, args...)}
	if e != nil {
		u.FQN, u.Chunk = e.Item.Shard.FQN, e.BoxString()
	}
	p.out.Left = append(p.out.Left, u)
}

// holder is a name of a file in a checkpoint's directory.
type holder struct {
	ref  checkpoint.Ref
	name string
}

// at returns the name in the backend.
func (h holder) at() string { return nameOf(h.ref, h.name) }

// file repairs one data file under all of its names.
func (p *repair) file(ctx context.Context, ref checkpoint.Ref, name string) error {
	here, link, path := holder{ref, name}, checkpoint.LinkName(ref, name), p.root.path(ref, name)
	if p.done[here] {
		return nil
	}
	if !checkpoint.HoldsData(name) {
		p.left(ref, name, nil, "only the bytes of tensors and values have copies; restore the file from a backup, or delete the checkpoint and resume from another")
		return nil
	}
	known := p.known[link]
	if len(known.entries) == 0 && known.header == nil {
		p.left(ref, name, nil, "no readable index describes the file; restore the file or the index from a backup")
		return nil
	}
	same, whole, err := p.sort(ctx, here, p.holders[link], known)
	if err != nil {
		return err
	}
	old, unopened := p.root.b.Open(ctx, here.at())
	if old != nil {
		defer func() { _ = old.Close() }() // nothing was written to it
	}
	fixed := RepairedFile{Ref: ref, File: name}
	var lost []*checkpoint.Entry
	switch {
	case whole != nil:
		fixed.From = p.root.path(whole.ref, whole.name)
		if err := p.replace(ctx, here, *whole); err != nil {
			return err
		}
		delete(p.poor, path)
	case unopened != nil && !errors.Is(unopened, fs.ErrNotExist):
		return unopened
	default:
		made, err := p.write(ctx, here, known, old)
		if err != nil || !made.ok {
			return err
		}
		delete(p.poor, path)
		if ok, err := known.whole(ctx, p.root, here.at(), made.lost...); err != nil {
			return err
		} else if !ok {
			p.left(ref, name, nil, "the rewritten file reads back with other bytes than were written; check the disk's health and the kernel's log, then run the command again")
			return nil
		}
		fixed.Chunks, whole, lost = made.chunks, &here, made.lost
	}
	p.done[here] = true
	if err := p.relink(ctx, same, *whole, &fixed); err != nil {
		return err
	}
	p.out.Files = append(p.out.Files, fixed)
	f := followed{here: here, whole: *whole, link: link, known: known, lost: lost}
	return p.follow(ctx, f, old, &p.out.Files[len(p.out.Files)-1])
}

// held lists the names, in all directories and also of uncommitted saves, of the files that
// have one of these link names.
func (p *repair) held(ctx context.Context, wanted func(link string) bool) (by map[string][]holder, err error) {
	by = map[string][]holder{}
	var errs []error
	err = p.root.walk(ctx, func(ref checkpoint.Ref) {
		names, err := p.root.names(ctx, nameOf(ref))
		if err != nil {
			errs = append(errs, disk.Gone(err)) // a directory may disappear meanwhile
			return
		}
		for _, name := range names {
			if !checkpoint.HoldsData(name) {
				continue
			}
			if link := checkpoint.LinkName(ref, name); wanted(link) {
				by[link] = append(by[link], holder{ref, name})
			}
		}
	}, func(Damaged) {}) // the target of a symbolic link is not part of this data
	return by, errors.Join(append(errs, err)...)
}

// sort finds the other names of the damaged file, and an undamaged file that the damaged one
// was once linked to.
func (p *repair) sort(ctx context.Context, here holder, holders []holder, known *knowledge) (same []holder, whole *holder, err error) {
	for _, h := range holders {
		if h == here {
			continue
		}
		one, err := p.one(ctx, here.at(), h.at())
		if err != nil {
			return nil, nil, err
		}
		if one {
			same = append(same, h)
			continue
		}
		if whole == nil {
			ok, err := known.whole(ctx, p.root, h.at())
			if err != nil {
				return nil, nil, err
			}
			if ok {
				whole = &h
			}
		}
	}
	return same, whole, nil
}

// one reports whether two names are links to the same file.
func (p *repair) one(ctx context.Context, a, b string) (bool, error) {
	x, err := p.root.b.Stat(ctx, a)
	if err != nil {
		return false, disk.Gone(err)
	}
	y, err := p.root.b.Stat(ctx, b)
	if err != nil {
		return false, disk.Gone(err)
	}
	if x.ID != "" {
		return x.ID == y.ID, nil
	}
	return sameFile(ctx, p.root.b, a, p.root.b, b) == nil, nil
}

// replace atomically makes name a link to an undamaged file.
func (p *repair) replace(ctx context.Context, name, whole holder) error {
	if err := p.root.b.Link(ctx, whole.at(), name.at(), object.Replace); err != nil {
		return fmt.Errorf("link the repaired file to %s: %w", p.root.path(name.ref, name.name), err)
	}
	return p.root.sync(ctx, name.ref)
}

// relink makes names links to an undamaged file. A name that disappears meanwhile, with its
// save or its checkpoint, needs no link.
func (p *repair) relink(ctx context.Context, names []holder, whole holder, fixed *RepairedFile) error {
	for _, h := range names {
		if err := p.replace(ctx, h, whole); err != nil {
			if _, gone := p.root.b.Stat(ctx, h.at()); errors.Is(gone, fs.ErrNotExist) {
				continue
			}
			return err
		}
		path := p.root.path(h.ref, h.name)
		p.done[h] = true
		delete(p.poor, path)
		fixed.Links = append(fixed.Links, path)
	}
	return nil
}

// followed is a damaged file and the undamaged file that replaced it.
type followed struct {
	here, whole holder
	link        string
	known       *knowledge
	lost        []*checkpoint.Entry // that the replacement lacks too
}

// rounds bounds the searches for names of a file. Each round finds the links made during the
// one before, so a second round is rare.
const rounds = 5

// follow replaces the names that saves gave to the damaged file since its names were listed.
// The file is open, so that no other file gets its ID.
func (p *repair) follow(ctx context.Context, f followed, old object.Object, fixed *RepairedFile) error {
	if old == nil {
		return nil // a missing file cannot be linked
	}
	listed := map[holder]bool{f.here: true, f.whole: true}
	for _, h := range p.holders[f.link] {
		listed[h] = true
	}
	for range rounds {
		info, err := old.Stat()
		if err != nil {
			return err
		}
		if info.ID != "" && info.Links == 0 {
			return nil // without a name it cannot be linked
		}
		names, err := p.held(ctx, func(link string) bool { return link == f.link })
		if err != nil {
			return err
		}
		var late []holder
		for _, h := range names[f.link] {
			is, err := p.late(ctx, f, info.ID, h, listed[h])
			if err != nil {
				return err
			}
			if is {
				late = append(late, h)
			}
			listed[h] = true
		}
		if len(late) == 0 {
			return nil
		}
		if err := p.relink(ctx, late, f.whole, fixed); err != nil {
			return err
		}
	}
	p.left(f.here.ref, f.here.name, nil, "saves kept linking the damaged file while it was replaced; run the command again")
	return nil
}

// late reports whether a name still belongs to the damaged file. Where files have no ID, that
// is a new name of a file that is damaged.
func (p *repair) late(ctx context.Context, f followed, old string, h holder, listed bool) (bool, error) {
	if old == "" {
		if listed {
			return false, nil
		}
		ok, err := f.known.whole(ctx, p.root, h.at(), f.lost...)
		return !ok, err
	}
	info, err := p.root.b.Stat(ctx, h.at())
	if err != nil {
		return false, disk.Gone(err)
	}
	return info.ID == old, nil
}

// rewritten is a file that was made from a damaged one.
type rewritten struct {
	ok     bool
	chunks []RepairedChunk
	lost   []*checkpoint.Entry // whose bytes remain damaged
}

// write replaces a damaged file by an undamaged one under the same name. It returns a nil
// file if the damaged one is gone. ok is false, and nothing is changed, if the result would
// be no better.
func (p *repair) write(ctx context.Context, here holder, k *knowledge, old object.Object) (out rewritten, err error) {
	header, err := k.headerOf(old)
	if err != nil || header == nil {
		p.left(here.ref, here.name, nil, "its header is damaged, and the checkpoint that wrote it is gone; restore the file from a backup")
		return rewritten{}, ctx.Err()
	}
	bad, err := k.damaged(ctx, old)
	if err != nil {
		return rewritten{}, err
	}
	from := map[*checkpoint.Entry]donor{}
	for _, e := range bad {
		d, found, err := p.donor(ctx, e)
		if err != nil {
			return rewritten{}, err
		}
		if found {
			from[e] = d
			out.chunks = append(out.chunks, RepairedChunk{FQN: e.Item.Shard.FQN, Chunk: e.BoxString(), Bytes: e.Item.Bytes, From: d.from})
			continue
		}
		out.lost = append(out.lost, e)
		p.left(here.ref, here.name, e, "no other file and no staging slot has these bytes; resume from another checkpoint, and delete this one")
		if !readable(old, e.Offset, e.Item.Bytes) {
			return rewritten{}, nil // there is no file to replace
		}
	}
	if len(out.chunks) == 0 {
		if ok, err := k.sound(old); ok || err != nil {
			return rewritten{}, err // nothing would change
		}
	}
	out.ok = true
	return out, p.publish(ctx, here, k, header, old, from, out.lost)
}

func readable(f object.Object, offset, size int64) bool {
	if f == nil {
		return false
	}
	_, err := io.Copy(io.Discard, io.NewSectionReader(f, offset, size))
	info, serr := f.Stat()
	return err == nil && serr == nil && info.Size >= offset+size
}

// publish writes the file and renames it to the damaged one's name.
func (p *repair) publish(ctx context.Context, here holder, k *knowledge, header []byte, old object.Object, from map[*checkpoint.Entry]donor, lost []*checkpoint.Entry) (err error) {
	claim := &claim{root: p.root, left: k.size}
	if err := p.root.reserve(ctx, claim.left); err != nil {
		return err
	}
	defer claim.give()
	up, _, err := p.root.begin(claim, k.size, func() (object.Upload, error) {
		return p.root.b.Create(ctx, here.at(), k.size, object.Replace)
	})
	if err != nil {
		return err
	}
	defer up.Abort()
	to := &inPieces{to: up, buf: object.Buffer(up.Piece())}
	if err := errors.Join(k.fill(ctx, to, header, old, from, lost), to.flush()); err != nil {
		return fmt.Errorf("write %s: %w", p.root.path(here.ref, here.name), err)
	}
	if err := up.Commit(ctx); err != nil {
		return err
	}
	return p.root.sync(ctx, here.ref)
}

// inPieces combines consecutive writes to pieces.
type inPieces struct {
	to  object.Upload
	buf []byte
	n   int // bytes of the present piece
	off int64
}

// WriteAt implements io.WriterAt for the next byte only.
func (w *inPieces) WriteAt(p []byte, off int64) (int, error) {
	if off != w.off+int64(w.n) {
		return 0, fmt.Errorf("write at %d, the next byte is %d", off, w.off+int64(w.n))
	}
	total := len(p)
	for len(p) > 0 {
		k := copy(w.buf[w.n:], p)
		w.n += k
		p = p[k:]
		if w.n == len(w.buf) {
			if err := w.flush(); err != nil {
				return 0, err
			}
		}
	}
	return total, nil
}

// flush writes a piece, also the last one.
func (w *inPieces) flush() error {
	if w.n == 0 {
		return nil
	}
	_, err := w.to.WriteAt(w.buf[:w.n], w.off)
	w.off += int64(w.n)
	w.n = 0
	return err
}

// fill writes all bytes of the file: the header, the chunks, and the gaps between them. It
// compares each chunk with its digest, except those that stay damaged. No checkpoint needs
// the gaps, so unreadable ones are skipped.
func (k *knowledge) fill(ctx context.Context, to io.WriterAt, header []byte, old object.Object, from map[*checkpoint.Entry]donor, lost []*checkpoint.Entry) error {
	if _, err := to.WriteAt(header, 0); err != nil {
		return err
	}
	at := int64(len(header))
	for _, e := range k.entries {
		if err := copyRest(ctx, to, old, at, e.Offset); err != nil {
			return err
		}
		at = e.Offset + e.Item.Bytes
		d, repaired := from[e]
		var err error
		switch {
		case repaired:
			err = d.copyTo(ctx, to, e)
		case slices.Contains(lost, e):
			err = copyRest(ctx, to, old, e.Offset, at)
		default:
			err = copyChunk(ctx, to, old, e.Offset, e)
		}
		if err != nil {
			return err
		}
	}
	return copyRest(ctx, to, old, at, k.size)
}

// copyChunk writes the bytes of a chunk, which src has at offset from, and compares them with
// its digest.
func copyChunk(ctx context.Context, to io.WriterAt, src io.ReaderAt, from int64, e *checkpoint.Entry) error {
	hash := scan.NewHasher()
	defer hash.Free()
	_, err := scan.Windows(ctx, src, from, from+e.Item.Bytes, func(window []byte, at int64) error {
		hash.Add(window)
		_, err := to.WriteAt(window, e.Offset+at-from)
		return err
	})
	if scan.ShortOf(err) != nil {
		return fmt.Errorf("read %q: %w", e.Item.Shard.FQN, err)
	}
	if err == nil && hash.Digest() != e.Digest {
		err = fmt.Errorf("the bytes of %q %s have changed while they were copied; run the command again", e.Item.Shard.FQN, e.BoxString())
	}
	return err
}

// copyRest writes the bytes of a file between two offsets, and zeros for unreadable ones.
func copyRest(ctx context.Context, to io.WriterAt, old object.Object, at, end int64) error {
	buf := scan.Buffers.Get().(*[]byte)
	defer scan.Buffers.Put(buf)
	for at < end {
		if err := ctx.Err(); err != nil {
			return err
		}
		window := (*buf)[:min(int64(len(*buf)), end-at)]
		n := 0
		if old != nil {
			n, _ = old.ReadAt(window, at) // no checkpoint needs these bytes
		}
		clear(window[n:])
		if _, err := to.WriteAt(window, at); err != nil {
			return err
		}
		at += int64(len(window))
	}
	return nil
}
