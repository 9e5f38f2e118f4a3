package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Target is a committed checkpoint.
type Target struct {
	Ref      checkpoint.Ref
	Manifest checkpoint.Digest // as the log says
}

// ChunkSource has bytes of chunks beside the files of a store, such as staging
// slots in shared memory.
type ChunkSource interface {
	// Chunk is the bytes with a digest, of the same dtype and size as like,
	// and where they were found; nil if there are none. Several calls may not
	// run at the same time. The bytes are not kept.
	Chunk(ctx context.Context, like checkpoint.Item, digest checkpoint.Digest) (data []byte, from string, err error)
}

// RepairedFile is a data file that was written anew, or linked to one that is
// whole.
type RepairedFile struct {
	Ref    checkpoint.Ref
	File   string          // name in its directory
	Chunks []RepairedChunk // that had other bytes than were written
	Links  []string        // paths of the same file in other directories, which were repaired too
	From   string          // path of a whole copy that was linked in; empty when it was written
}

// RepairedChunk is a chunk that has its bytes again.
type RepairedChunk struct {
	FQN   string
	Chunk string // box; empty for a value
	Bytes int64
	From  string // path of the file, or the staging slot, that had them
}

// Unrepaired is damage that stays.
type Unrepaired struct {
	Ref    checkpoint.Ref
	File   string
	FQN    string // empty when the file as a whole is meant
	Chunk  string
	Reason string // with the next step
}

// Repairs says what [Root.Repair] did. What is left of damage in a file that was
// repaired is in Left.
type Repairs struct {
	Files []RepairedFile
	Left  []Unrepaired
}

// Repair gives damaged chunks their bytes again, from any chunk with the same
// digest, dtype and size: in the same file, in another file or checkpoint of
// all, or in one of the sources. damaged are the files that a verification
// found something in, by checkpoint; all is every committed checkpoint.
//
// Of each such file a new one is written under a temporary name, compared with
// the digests, synced, and given the name. Directories that have a link to the
// damaged file get one to the new one, also those that a save makes meanwhile.
// The new file is read again before that. After a crash each directory has the
// one or the other, and the same call goes on. Manifests, indexes, receipts and
// adopted files are left as they are.
//
// Two repairs of the same data at a time are the caller's mistake: they would
// take each other's files for damaged ones.
func (r *Root) Repair(ctx context.Context, damaged map[checkpoint.Ref][]string, all []Target, sources ...ChunkSource) (Repairs, error) {
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

// repair is one call of Repair.
type repair struct {
	root    *Root
	all     []Target
	sources []ChunkSource
	known   map[string]*knowledge       // of the damaged files, by the name where they are linked in
	places  map[content][]donorPlace    // of what is in them
	holders map[string][]holder         // of the damaged files, when the call began
	done    map[holder]bool             // names that were repaired with another one
	poor    map[string]map[donorAt]bool // places, by path, that have other bytes than they should
	out     Repairs
}

func (p *repair) left(ref checkpoint.Ref, file string, e *checkpoint.Entry, format string, args ...any) {
	u := Unrepaired{Ref: ref, File: file, Reason: fmt.Sprintf(format, args...)}
	if e != nil {
		u.FQN, u.Chunk = e.Item.Shard.FQN, e.BoxString()
	}
	p.out.Left = append(p.out.Left, u)
}

// holder is a directory's name of a file.
type holder struct {
	ref  checkpoint.Ref
	name string
}

// at is the name in the backend.
func (h holder) at() string { return nameOf(h.ref, h.name) }

// file repairs one data file, wherever it has names.
func (p *repair) file(ctx context.Context, ref checkpoint.Ref, name string) error {
	here, link, path := holder{ref, name}, checkpoint.LinkName(ref, name), p.root.path(ref, name)
	if p.done[here] {
		return nil
	}
	if !checkpoint.HoldsData(name) {
		p.left(ref, name, nil, "only the bytes of tensors and values have copies: put the file back from a backup, or delete the checkpoint and resume from another")
		return nil
	}
	known := p.known[link]
	if len(known.entries) == 0 && known.header == nil {
		p.left(ref, name, nil, "no index that can be read says what it holds: put the file or the index back from a backup")
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
			p.left(ref, name, nil, "it was written anew, and other bytes are read from it than were written: look at the disk's health and the kernel's log, then run the command again")
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
