package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/object"
)

// held are the names in all directories, also of saves that are not committed,
// of the files that have one of these names where they are linked in.
func (p *repair) held(ctx context.Context, wanted func(link string) bool) (by map[string][]holder, err error) {
	by = map[string][]holder{}
	var errs []error
	err = p.root.walk(ctx, func(ref checkpoint.Ref) {
		names, err := p.root.b.List(ctx, nameOf(ref))
		if err != nil {
			errs = append(errs, disk.Gone(err)) // a directory may go meanwhile
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
	}, func(Damaged) {}) // what is behind a symbolic link is none of this data
	return by, errors.Join(append(errs, err)...)
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
	if x.ID != (object.FileID{}) {
		return x.ID == y.ID, nil
	}
	return sameFile(ctx, p.root.b, a, p.root.b, b) == nil, nil
}

// replace makes a name one of a file that is whole, in one step.
func (p *repair) replace(ctx context.Context, name, whole holder) error {
	if err := p.root.b.Link(ctx, whole.at(), name.at(), object.Replace); err != nil {
		return fmt.Errorf("link the repaired file to %s: %w", p.root.path(name.ref, name.name), err)
	}
	return p.root.sync(ctx, name.ref)
}

// relink makes names those of a file that is whole. One that goes meanwhile, with
// its save or its checkpoint, needs nothing.
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

// followed is a file that has been replaced by one that is whole.
type followed struct {
	here, whole holder
	link        string
	known       *knowledge
	lost        []*checkpoint.Entry // that the whole one has not either
}

// rounds is how often the names of a file are looked for again: each round finds
// what was linked during the one before, so a second is rare.
const rounds = 5

// follow goes after the names that saves gave to the damaged file since its
// names were listed. The file is open, so that no other one gets its ID.
func (p *repair) follow(ctx context.Context, f followed, old object.Object, fixed *RepairedFile) error {
	if old == nil {
		return nil // nobody links what is not there
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
		if info.ID != (object.FileID{}) && info.Links == 0 {
			return nil // without a name it gets none any more
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
	p.left(f.here.ref, f.here.name, nil, "saves went on to link the damaged file while it was replaced: run the command again")
	return nil
}

// late reports whether a name is still that of the damaged file. Where files
// have no ID, that is one that was not there before and is not whole.
func (p *repair) late(ctx context.Context, f followed, old object.FileID, h holder, listed bool) (bool, error) {
	if old == (object.FileID{}) {
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
