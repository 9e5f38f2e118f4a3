package main

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/tensor"
)

// batch is the number of samples of each step of a [replica], over all ranks.
const batch = 12

// replica is one rank's copy of a model that any number of ranks trains: each rank computes its
// samples of the batch, and all add up the parts in the order of the ranks. So a loss depends on
// the step, on the weights, and by the order of the additions on the number of ranks.
type replica struct {
	rank, world int
	weights     []float64
}

func newReplica(rank, world int) *replica {
	m := &replica{rank, world, make([]float64, blockSize)}
	for i := range m.weights {
		m.weights[i] = math.Sin(float64(1 + i))
	}
	return m
}

func (m *replica) partial(step int64) (sum float64) {
	for sample := m.rank; sample < batch; sample += m.world {
		for i, w := range m.weights {
			sum += w * math.Cos(float64(int64(i)*31+step*17+int64(sample)*7))
		}
	}
	return sum
}

func (m *replica) update(parts []float64) (loss float64) {
	for _, p := range parts {
		loss += p
	}
	for i := range m.weights {
		m.weights[i] = 0.9*m.weights[i] + 0.1*math.Sin(loss+float64(i))
	}
	return loss
}

// saved is this rank's part of the weights, as nearly equal ones as there are ranks.
func (m *replica) saved() client.Tensor {
	from, to := m.rank*blockSize/m.world, (m.rank+1)*blockSize/m.world
	return weightsOf(m.weights[from:to], int64(from), blockSize)
}

// loaded is the whole of the weights, to load into.
func (m *replica) loaded() client.Tensor { return weightsOf(m.weights, 0, blockSize) }

func (m *replica) values() []float64 { return m.weights }

func (m *replica) own() []client.Value { return nil }

// weightsOf is a part of a tensor of weights.
func weightsOf(part []float64, from, all int64) client.Tensor {
	data := make([]byte, 0, 8*len(part))
	for _, v := range part {
		data = binary.LittleEndian.AppendUint64(data, math.Float64bits(v))
	}
	return client.Tensor{Shard: tensor.Shard{
		FQN: "weights", DType: tensor.Float64, Global: tensor.Shape{all}, Box: tensor.Box{Offsets: []int64{from}, Sizes: []int64{int64(len(part))}},
	}, Data: data}
}

// scheduled returns the losses of a run that nothing interrupts, whose step i+1 is trained by
// worlds[i] ranks.
func scheduled(worlds []int) (losses []string) {
	model := newReplica(0, 1)
	for i, world := range worlds {
		parts := make([]float64, world)
		for rank := range parts {
			parts[rank] = (&replica{rank, world, model.weights}).partial(int64(i + 1))
		}
		losses = append(losses, bits(model.update(parts)))
	}
	return losses
}

// attemptOf is what one attempt of an elastic run has trained.
type attemptOf struct {
	attempt, world int
	first, last    int64 // steps
	committed      int64 // its last step that was acknowledged as saved, 0 for none
}

// elastic compares the losses of each attempt with those of an unbroken run on the same schedule
// of world sizes: the steps before the attempt's first one as the attempts before it have left
// them, then its own. It returns the attempts that have trained a step.
func elastic(v *verdict, lives []life) (all []attemptOf) {
	var schedule []int
	attempts := keys(byAttempt(lives))
	slices.Sort(attempts)
	for _, attempt := range attempts {
		group := byAttempt(lives)[attempt]
		a := attemptOf{attempt: attempt, world: group[0].World}
		for _, l := range group {
			v.Steps = max(v.Steps, l.step())
			for _, line := range l.Lines {
				if line.What == whatSaved {
					v.Saved, a.committed = v.Saved+1, max(a.committed, line.Step)
				}
			}
			if first := l.first(); a.first == 0 || first > 0 && first < a.first {
				a.first = first
			}
			a.last = max(a.last, l.step())
		}
		if a.first == 0 {
			continue
		}
		if a.first-1 > int64(len(schedule)) {
			v.find("attempt %d begins with step %d: the steps from %d are lost", attempt, a.first, len(schedule)+1)
			return all
		}
		schedule = schedule[:a.first-1]
		for range a.last - a.first + 1 {
			schedule = append(schedule, a.world)
		}
		want := scheduled(schedule)
		for _, l := range group {
			next := a.first
			for _, line := range l.Lines {
				if line.What != whatStep {
					continue
				}
				if line.Step != next {
					v.find("attempt %d: rank %d trains step %d, want %d", attempt, l.Rank, line.Step, next)
				}
				if next++; line.Loss != want[line.Step-1] {
					v.find("attempt %d: rank %d has the loss %s in step %d, an unbroken run on this schedule has %s", attempt, l.Rank, line.Loss, line.Step, want[line.Step-1])
				}
			}
		}
		all = append(all, a)
	}
	return all
}

func byAttempt(lives []life) map[int][]life {
	by := map[int][]life{}
	for _, l := range lives {
		by[l.Attempt] = append(by[l.Attempt], l)
	}
	return by
}
