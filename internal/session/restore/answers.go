package restore

import (
	"slices"

	"github.com/ckptstore/ckptstore/client"
)

// answers returns the answer of each rank, with the places of its items.
func (r *restore) answers() []answer {
	out := make([]answer, len(r.ranks))
	for rank := range r.ranks {
		if of := &r.ranks[rank]; of.slots {
			out[rank] = r.answer(rank, of)
		} else {
			out[rank] = r.oneArena(rank, of)
		}
	}
	return out
}

// oneArena returns the answer of a rank that reads everything from one file.
func (r *restore) oneArena(rank int, of *restoreRank) answer {
	reply := client.OneArenaReply{
		Checkpoint: r.ckpt.ID, Step: r.ckpt.Step, Arena: of.arena.Path(), Size: of.size, Unread: r.unread,
		Offsets: make([]int64, len(of.items)), Sizes: slices.Repeat([]int64{-1}, len(of.items)),
	}
	for i, item := range of.of {
		if !of.absent(i) {
			reply.Offsets[item], reply.Sizes[item] = of.offsets[i], of.sizes[i]
		}
	}
	return answer{reply: reply, arena: of.arena, by: loan{rank: rank, path: of.arena.Path()}}
}

// answer returns the answer of a rank that can read several files.
func (r *restore) answer(rank int, of *restoreRank) answer {
	out := answer{arena: of.arena, slots: of.lent(), verdict: r.verdict, by: loan{rank: rank, load: r.n}}
	reply := client.LoadReply{
		Checkpoint: r.ckpt.ID, Step: r.ckpt.Step, Load: r.n, Arenas: []client.LoadArena{}, Unread: r.unread,
		In: make([]int, len(of.items)), Offsets: make([]int64, len(of.items)), Sizes: make([]int64, len(of.items)),
	}
	number := map[spot]int{} // a file's spot has only its path
	name := func(s spot, path string, size int64) {
		number[s] = len(reply.Arenas)
		reply.Arenas = append(reply.Arenas, client.LoadArena{Path: path, Size: size})
	}
	for _, a := range out.slots {
		name(spot{arena: a}, a.Path(), int64(len(a.Data())))
	}
	for _, path := range of.lentFiles() {
		name(spot{file: path}, path, r.files[path])
	}
	if of.arena != nil {
		name(spot{arena: of.arena}, of.arena.Path(), of.size)
	}
	for item := range reply.Sizes {
		reply.Sizes[item] = -1
	}
	for i, item := range of.of {
		if of.absent(i) {
			continue
		}
		at := of.spot(i)
		if !at.lent() {
			at = spot{arena: of.arena, off: of.offsets[i]}
		}
		reply.In[item], reply.Offsets[item], reply.Sizes[item] = number[spot{arena: at.arena, file: at.file}], at.off, of.sizes[i]
		if at.check != nil {
			if reply.Checks == nil {
				reply.Checks = &client.Checks{}
			}
			reply.Checks.Add(item, at.check.Before, at.check.After, at.check.Sums)
		}
	}
	out.reply = reply
	return out
}
