package main

import (
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
)

// voidText says what a message of the log lacks to be an event.
func voidText(v store.LogVoid) string {
	return fmt.Sprintf("message %d on %q is no event: %s", v.Sequence, v.Subject, v.Why)
}

// addVoids makes findings of the messages that are no events, unless the owner has
// recorded them.
func (v *verified) addVoids(read store.ReadLog) {
	add := func(seq uint64, problem string) {
		v.Findings = append(v.Findings, finding{
			Finding:  data.Finding{Kind: logVoid, File: "log", Block: -1, Offset: -1, Problem: problem},
			Sequence: seq, Until: seq,
		})
	}
	wanted := read.Unrecorded
	if v.strict {
		wanted = read.VoidCount
	}
	for _, void := range read.Voids {
		if void.RecordedSeq == 0 || v.strict {
			add(void.Sequence, voidText(void))
			wanted--
		}
	}
	if wanted > 0 {
		add(0, fmt.Sprintf("%d more messages are no events", wanted))
	}
}

// printVoids lists the messages that are no events and that the owner has recorded:
// the others are findings.
func (v *verified) printVoids(w io.Writer) {
	for _, void := range v.Log.Voids {
		if void.RecordedSeq > 0 && !v.strict {
			fmt.Fprintf(w, "log: %s (recorded by event %d)\n", voidText(void), void.RecordedSeq)
		}
	}
	if more := v.Log.VoidCount - len(v.Log.Voids); more > 0 {
		fmt.Fprintf(w, "log: and %d more messages that are no events\n", more)
	}
}
