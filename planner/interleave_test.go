package planner_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"pgregory.net/rapid"
)

// However the ranks' facts interleave with each other, with the coordinator's
// own words and with the writes that it asked for, there is one commit, and
// its manifest is the same.
func TestAnyInterleavingCommitsTheSameManifest(t *testing.T) {
	ids := []string{"x.a2", "y.a2"}
	manifests := map[int]map[string][]byte{}
	for world := 1; world <= 4; world++ {
		_, manifests[world] = happy(t, world, ids...)
	}
	rapid.Check(t, func(t *rapid.T) {
		world := rapid.IntRange(1, 4).Draw(t, "world")
		c := &cluster{t: t, world: world}
		coord := planner.NewCoordinator(config(world))
		var todo [][]events.Body // the events that each rank has yet to send, in order
		for rank := range world {
			var own []events.Body
			for _, id := range ids {
				own = append(own, c.plan(id, rank), sealed(id, rank))
			}
			todo = append(todo, own)
		}
		applied := 0
		var words []events.Body // commanded, not in the log yet; in order
		var writes []planner.Write
		asked := map[string]int{}
		tick := func() {
			due, _ := coord.Tick(start)
			for _, command := range due {
				switch command := command.(type) {
				case planner.Decide:
					words = append(words, command.Body)
				case planner.Publish:
					words = append(words, command.Body)
				case planner.Write:
					asked[fmt.Sprint(command.Checkpoint, command.Rank)]++
					writes = append(writes, command)
				case planner.Commit:
					if want := manifests[world][command.Manifest.Checkpoint]; !bytes.Equal(checkpoint.EncodeManifest(command.Manifest), want) {
						t.Fatalf("manifest %+v is another one", command.Manifest)
					}
					words = append(words, committed(command))
				}
			}
		}
		for {
			var moves []func()
			for rank := range todo {
				if len(todo[rank]) > 0 {
					moves = append(moves, func() { c.append(todo[rank][0]); todo[rank] = todo[rank][1:] })
				}
			}
			for i := range writes {
				moves = append(moves, func() {
					c.append(written(writes[i].Checkpoint, writes[i].Rank))
					writes = slices.Delete(writes, i, i+1)
				})
			}
			if len(words) > 0 {
				moves = append(moves, func() { c.append(words[0]); words = words[1:] })
			}
			if applied < len(c.log) {
				moves = append(moves, func() {
					if err := coord.Apply(c.log[applied]); err != nil {
						t.Fatal(err)
					}
					applied++
					tick()
				})
			}
			if len(moves) == 0 {
				break
			}
			moves[rapid.IntRange(0, len(moves)-1).Draw(t, "move")]()
		}
		for _, id := range ids {
			if _, ends := outcome(c.log, id); ends != " committed" {
				t.Fatalf("%s ended as%q", id, ends)
			}
		}
		for what, n := range asked {
			if n != 1 {
				t.Fatalf("%s was asked to be written %d times", what, n)
			}
		}
	})
}
