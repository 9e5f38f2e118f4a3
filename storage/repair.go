package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage/backend"
	"github.com/ckptstore/ckptstore/storage/disk"
)

// Target is a committed checkpoint.
type Target struct {
	Ref      Ref
	Manifest plan.Digest // as the log says
}

// ChunkSource has bytes of chunks beside the files of a store, such as staging
// slots in shared memory.
type ChunkSource interface {
	// Chunk is the bytes with a digest, of the same dtype and size as like,
	// and where they were found; nil if there are none. Several calls may not
	// run at the same time. The bytes are not kept.
	Chunk(ctx context.Context, like plan.Item, digest plan.Digest) (data []byte, from string, err error)
}

// RepairedFile is a data file that was written anew, or linked to one that is
// whole.
type RepairedFile struct {
	Ref    Ref
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
	Ref    Ref
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
// damaged file get one to the new one. After a crash each has the one or the
// other, and the same call goes on. Manifests, indexes, receipts and adopted
// files are left as they are.
func (r *Root) Repair(ctx context.Context, damaged map[Ref][]string, all []Target, sources ...ChunkSource) (Repairs, error) {
	p := &repair{root: r, all: all, sources: sources, done: map[holder]bool{}}
	refs := make([]Ref, 0, len(damaged))
	for ref := range damaged {
		refs = append(refs, ref)
	}
	slices.SortFunc(refs, func(a, b Ref) int { return strings.Compare(a.String(), b.String()) })
	for _, ref := range refs {
		names := slices.Clone(damaged[ref])
		slices.Sort(names)
		for _, name := range slices.Compact(names) {
			err := errors.Join(ctx.Err(), ref.Validate(), validateName(name))
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
	done    map[holder]bool // names that were repaired with another one
	out     Repairs
}

func (p *repair) left(ref Ref, file string, e *entry, format string, args ...any) {
	u := Unrepaired{Ref: ref, File: file, Reason: fmt.Sprintf(format, args...)}
	if e != nil {
		u.FQN, u.Chunk = e.item.Shard.FQN, e.box()
	}
	p.out.Left = append(p.out.Left, u)
}

// holder is a directory's name of a file.
type holder struct {
	ref  Ref
	name string
}

// at is the name in the backend.
func (h holder) at() string { return nameOf(h.ref, h.name) }

// file repairs one data file, wherever it has names.
func (p *repair) file(ctx context.Context, ref Ref, name string) error {
	here := holder{ref, name}
	if p.done[here] {
		return nil
	}
	if !strings.HasSuffix(name, dataSuffix) && !isLink(name) {
		p.left(ref, name, nil, "only the bytes of tensors and values have copies: put the file back from a backup, or delete the checkpoint and resume from another")
		return nil
	}
	known, err := p.knowledge(ctx, linkName(ref, name))
	if err != nil {
		return err
	}
	if len(known.entries) == 0 && known.header == nil {
		p.left(ref, name, nil, "no index that can be read says what it holds: put the file or the index back from a backup")
		return nil
	}
	holders, err := p.holders(ctx, linkName(ref, name))
	if err != nil {
		return err
	}
	same, whole, err := p.sort(ctx, here, holders, known)
	if err != nil {
		return err
	}
	fixed := RepairedFile{Ref: ref, File: name}
	if whole != nil {
		fixed.From = p.root.path(whole.ref, whole.name)
		if err := p.replace(ctx, here, *whole); err != nil {
			return err
		}
	} else {
		chunks, ok, err := p.write(ctx, here, known)
		if err != nil || !ok {
			return err
		}
		fixed.Chunks, whole = chunks, &here
	}
	for _, h := range same {
		if err := p.replace(ctx, h, *whole); err != nil {
			return err
		}
		p.done[h] = true
		fixed.Links = append(fixed.Links, p.root.path(h.ref, h.name))
	}
	p.done[here] = true
	p.out.Files = append(p.out.Files, fixed)
	return nil
}

// holders are the names of a file in all directories, also of saves that are not
// committed, by the name that it has where it is linked in.
func (p *repair) holders(ctx context.Context, link string) (list []holder, err error) {
	var errs []error
	err = p.root.walk(ctx, func(ref Ref) {
		names, err := p.root.b.List(ctx, nameOf(ref))
		if err != nil {
			errs = append(errs, disk.Gone(err)) // a directory may go meanwhile
			return
		}
		for _, name := range names {
			if (isLink(name) || strings.HasSuffix(name, dataSuffix)) && linkName(ref, name) == link {
				list = append(list, holder{ref, name})
			}
		}
	})
	return list, errors.Join(append(errs, err)...)
}

// sort finds the other names of the damaged file, and a whole file of which the
// damaged one was a link once.
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

// one reports whether two names are those of one file.
func (p *repair) one(ctx context.Context, a, b string) (bool, error) {
	x, err := p.root.b.Stat(ctx, a)
	if err != nil {
		return false, disk.Gone(err)
	}
	y, err := p.root.b.Stat(ctx, b)
	if err != nil {
		return false, disk.Gone(err)
	}
	if x.ID != (backend.FileID{}) {
		return x.ID == y.ID, nil
	}
	return sameFile(ctx, p.root.b, a, p.root.b, b) == nil, nil
}

// replace makes a name one of a file that is whole, in one step.
func (p *repair) replace(ctx context.Context, name, whole holder) error {
	if err := p.root.b.Link(ctx, whole.at(), name.at(), backend.Replace); err != nil {
		return fmt.Errorf("link the repaired file to %s: %w", p.root.path(name.ref, name.name), err)
	}
	return p.root.sync(ctx, name.ref)
}
