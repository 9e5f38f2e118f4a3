package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"filippo.io/torchwood"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// flippedBit is the bit that copies differ by. It changes the value of each digit of
// base64, also of a last digit, whose low bits have no meaning.
const flippedBit = 0x10

// judgeProof has torchwood verify the proof of one event. The entry is read from the log,
// or else taken from the proof's extra line.
func judgeProof(ctx context.Context, o options, file string, out io.Writer) error {
	text, err := os.ReadFile(o.policy)
	if err != nil {
		return err
	}
	policy, err := torchwood.ParsePolicy(text)
	if err != nil {
		return fmt.Errorf("%s: %w", o.policy, err)
	}
	proof, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	entry, err := entryOf(proof)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if err := torchwood.VerifyProof(policy, tlog.RecordHash(entry), proof); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	head, signed, err := headOf(proof, policy)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	fmt.Fprintf(out, "torchwood: %s is a proof of an entry of %d bytes in %s of size %d\n", file, len(entry), head.Origin, head.N)
	for _, s := range signed.Sigs {
		if at, err := torchwood.CosignatureTimestamp(s); err == nil && s.Name != head.Origin {
			fmt.Fprintf(out, "torchwood: cosigned by %s at %s\n", s.Name, time.Unix(at, 0).UTC().Format(time.RFC3339))
		}
	}
	if o.log != "" {
		if err := judgeEntry(ctx, o, policy, proof, entry, out); err != nil {
			return err
		}
	}
	if o.flip {
		return flips(policy, proof, entry, out)
	}
	return nil
}

// entryOf returns the entry in the extra line of a proof.
func entryOf(proof []byte) ([]byte, error) {
	extra, err := torchwood.ProofExtraData(proof)
	if err != nil {
		return nil, err
	}
	var of struct {
		Item struct {
			Entry []byte `json:"entry"`
		} `json:"item"`
	}
	if err := json.Unmarshal(extra, &of); err != nil {
		return nil, fmt.Errorf("extra line: %w", err)
	}
	if len(of.Item.Entry) == 0 {
		return nil, errors.New("extra line: no entry")
	}
	return of.Item.Entry, nil
}

// headOf returns the head of a proof, which follows its first empty line.
func headOf(proof []byte, policy torchwood.Policy) (torchwood.Checkpoint, *note.Note, error) {
	_, signed, ok := bytes.Cut(proof, []byte("\n\n"))
	if !ok {
		return torchwood.Checkpoint{}, nil, errors.New("no empty line")
	}
	return torchwood.VerifyCheckpoint(signed, policy)
}

// judgeEntry reads the whole log at a URL with torchwood's client, which proves each
// entry to be in the head. The proof must be of one of them.
func judgeEntry(ctx context.Context, o options, policy torchwood.Policy, proof, entry []byte, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, o.within)
	defer cancel()
	from, err := torchwood.NewTileFetcher(o.log)
	if err != nil {
		return err
	}
	signed, err := from.ReadEndpoint(ctx, "checkpoint")
	if err != nil {
		return fmt.Errorf("%s: %w", o.log, err)
	}
	head, _, err := torchwood.VerifyCheckpoint(signed, policy)
	if err != nil {
		return fmt.Errorf("%s: %w", o.log, err)
	}
	log, err := torchwood.NewClient(from)
	if err != nil {
		return err
	}
	read, at := int64(0), int64(-1)
	for i, e := range log.AllEntries(ctx, head.Tree, 0) {
		if read++; bytes.Equal(e, entry) {
			at = i
		}
	}
	switch err := log.Err(); {
	case err != nil:
		return fmt.Errorf("%s: %w", o.log, err)
	case read != head.N:
		return fmt.Errorf("%s: torchwood read %d entries of %d", o.log, read, head.N)
	case at < 0:
		return fmt.Errorf("%s: no entry of the log is that of the proof", o.log)
	case !bytes.Contains(proof, fmt.Appendf(nil, "\nindex %d\n", at)):
		return fmt.Errorf("%s: the proof is of another index than %d", o.log, at)
	}
	fmt.Fprintf(out, "torchwood: read and proved %d entries of %s; that of the proof has index %d\n", read, head.Origin, at)
	return nil
}

// flips changes one bit of each byte of the proof and of its entry in turn, and wants
// each refused. The extra line is not part of what torchwood verifies.
func flips(policy torchwood.Policy, proof, entry []byte, out io.Writer) error {
	rest := bytes.Index(proof, []byte("\nindex ")) + 1
	first := bytes.IndexByte(proof, '\n')
	refused := 0
	for i := range proof {
		if i > first && i < rest {
			continue
		}
		changed := slices.Clone(proof)
		changed[i] ^= flippedBit
		if torchwood.VerifyProof(policy, tlog.RecordHash(entry), changed) == nil {
			return fmt.Errorf("torchwood passes a proof whose byte %d is changed", i)
		}
		refused++
	}
	for i := range entry {
		changed := slices.Clone(entry)
		changed[i] ^= flippedBit
		if torchwood.VerifyProof(policy, tlog.RecordHash(changed), proof) == nil {
			return fmt.Errorf("torchwood passes an entry whose byte %d is changed", i)
		}
		refused++
	}
	fmt.Fprintf(out, "torchwood: refused each of %d copies with one changed bit\n", refused)
	return nil
}
