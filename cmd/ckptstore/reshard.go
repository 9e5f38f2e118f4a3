package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
)

// preview is what so many ranks would read of a layout; nil for none.
func preview(l checkpoint.Layout, ranks int) (*planner.Preview, error) {
	if ranks == 0 {
		return nil, nil
	}
	p, err := planner.NewPreview(l, ranks, checkpoint.BlockSize)
	return &p, err
}

// printReshard is the table of what each rank of another group would read.
// OVER-READ is what is read of the disk for each byte that is wanted: bytes
// are read in the blocks that checksums cover.
func printReshard(w *tabwriter.Writer, wide bool, p *planner.Preview) {
	fmt.Fprintln(w)
	row(w, "RANK", "SIZE", "OVER-READ", "READS", "MISSING", "FROM RANKS")
	for _, r := range p.Ranks {
		row(w, r.Rank, bytesize.Text(r.Bytes), factor(r.Read, r.Bytes), r.Reads, bytesize.Text(r.Missing), from(r, wide))
	}
	row(w, "all", bytesize.Text(p.Bytes), factor(p.Read, p.Bytes))
	lack, unread := map[string][]int{}, map[string][]int{}
	for _, r := range p.Ranks {
		for _, fqn := range r.Lacks {
			lack[fqn] = append(lack[fqn], r.Rank)
		}
	}
	for _, v := range p.Unread {
		unread[v.FQN] = append(unread[v.FQN], v.Rank)
	}
	for _, fqn := range slices.Sorted(maps.Keys(lack)) {
		fmt.Fprintf(w, "\n%s was saved by each rank for itself, and not by %s.\n", fqn, named(lack[fqn]))
	}
	for _, fqn := range slices.Sorted(maps.Keys(unread)) {
		fmt.Fprintf(w, "\n%s of %s is read by none.\n", fqn, named(unread[fqn]))
	}
}

// factor is how many bytes are read for one that is wanted.
func factor(read, bytes int64) string {
	if bytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", float64(read)/float64(bytes))
}

// from lists the ranks whose files a rank reads; a wide table says how much.
func from(r planner.RankPreview, wide bool) string {
	var ranks []int
	var sizes []string
	for _, f := range r.Files {
		ranks = append(ranks, f.Rank)
		sizes = append(sizes, fmt.Sprintf("%d: %s", f.Rank, bytesize.Text(f.Bytes)))
	}
	if wide {
		return strings.Join(sizes, ", ")
	}
	return ranges(ranks)
}

// ranges is ascending numbers in short: 0-3,7.
func ranges(ranks []int) string {
	var out []string
	for i := 0; i < len(ranks); i++ {
		first := ranks[i]
		for i+1 < len(ranks) && ranks[i+1] == ranks[i]+1 {
			i++
		}
		text := fmt.Sprint(first)
		if ranks[i] > first {
			text += fmt.Sprintf("-%d", ranks[i])
		}
		out = append(out, text)
	}
	return strings.Join(out, ",")
}

func named(ranks []int) string {
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d", ranks[0])
	}
	return "ranks " + ranges(ranks)
}
