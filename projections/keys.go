package projections

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
)

// Kinds of keys; the package comment lists the rest of each key.
const (
	keyStore      = 's'
	keyRun        = 'r'
	keyJob        = 'j'
	keyTrial      = 't'
	keyAttempt    = 'a'
	keyWorker     = 'w'
	keyRestore    = 'l'
	keyReport     = 'm'
	keyRollup     = 'u'
	keyCheckpoint = 'c'
	keyID         = 'i'
	keyOpen       = 'o'
	keyTag        = 'g'
	keyWrite      = 'p'
	keyValue      = 'b'
	keyAwait      = 'q'
	keyHeld       = 'e'
	keyValued     = 'h'
	keyDevice     = 'd'
	keyReplica    = 'k'
	keyVoid       = 'v'
	keyNewer      = 'n'
	keyUsage      = 'x'
	keyTally      = 'y'
	keyTerm       = 'f'
	keyJobTerm    = 'z'
)

// key starts a key of kind about the named things.
func key(kind byte, names ...string) []byte {
	k := append(make([]byte, 0, 64), kind)
	for _, name := range names {
		k = binary.AppendUvarint(k, uint64(len(name)))
		k = append(k, name...)
	}
	return k
}

func number(k []byte, n uint64) []byte { return binary.BigEndian.AppendUint64(k, n) }

func trialKey(run, trial string) []byte { return key(keyTrial, run, trial) }

func attemptKey(run, trial string, attempt int) []byte {
	return number(key(keyAttempt, run, trial), uint64(attempt))
}

func workerKey(run, trial string, attempt, rank int) []byte {
	return number(number(key(keyWorker, run, trial), uint64(attempt)), uint64(rank))
}

func termKey(run, trial string, attempt int) []byte {
	return number(key(keyTerm, run, trial), uint64(attempt))
}

func restoreKey(run, trial string, attempt, load int) []byte {
	return number(number(key(keyRestore, run, trial), uint64(attempt)), uint64(load))
}

func reportKey(run, trial string, attempt, iteration int) []byte {
	return number(number(key(keyReport, run, trial), uint64(attempt)), ^uint64(iteration))
}

func checkpointKey(run, trial string, begun uint64) []byte {
	return number(key(keyCheckpoint, run, trial), ^begun)
}

func openKey(run, trial string, begun uint64) []byte {
	return number(key(keyOpen, run, trial), ^begun)
}

// idKey is also the start of the keys of all IDs that start with id.
func idKey(run, trial, id string) []byte { return append(key(keyID, run, trial), id...) }

func tagKey(run, trial, tag string) []byte { return key(keyTag, run, trial, tag) }

func writeKey(run, trial, checkpoint string, rank int) []byte {
	return number(key(keyWrite, run, trial, checkpoint), uint64(rank))
}

func valueKey(run, trial, metric string, begun uint64) []byte {
	return number(key(keyValue, run, trial, metric), ^begun)
}

// begunOf returns the sequence at the end of a key.
func begunOf(k []byte) uint64 { return ^binary.BigEndian.Uint64(k[len(k)-8:]) }

func awaitKey(run, trial string, attempt, iteration int) []byte {
	return number(number(key(keyAwait, run, trial), uint64(attempt)), uint64(iteration))
}

func valuedKey(run, trial string, begun uint64) []byte {
	return number(key(keyValued, run, trial), ^begun)
}

func deviceKey(run, trial string, node int, device string) []byte {
	return append(number(key(keyDevice, run, trial), uint64(node)), device...)
}

func replicaKey(run, trial string, node int) []byte {
	return number(key(keyReplica, run, trial), uint64(node))
}

func usageKey(run, trial string) []byte { return key(keyUsage, run, trial) }

func voidKey(sequence uint64) []byte { return number(key(keyVoid), sequence) }

// after returns the first key that does not start with prefix.
func after(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i] != 0xff {
			end[i]++
			return end[:i+1]
		}
	}
	return nil
}

// load reads the row of key.
func load[T any](r Reader, key []byte) (row T, found bool, err error) {
	value, err := r.Get(key)
	if err != nil || value == nil {
		return row, false, err
	}
	if err := decode(key, value, &row); err != nil {
		return row, false, err
	}
	return row, true, nil
}

func decode(key, value []byte, row any) error {
	if err := json.Unmarshal(value, row); err != nil {
		return fmt.Errorf("row %q is damaged: %w; delete the views, they are rebuilt from the log", key, err)
	}
	return nil
}

// store writes row at key.
func store(t Table, key []byte, row any) error {
	value, err := json.Marshal(row)
	if err != nil {
		return fmt.Errorf("encode row %q: %w", key, err)
	}
	return t.Set(key, value)
}

// each visits the rows whose keys start with prefix.
func each[T any](r Reader, prefix []byte, visit func(T) error) error {
	return r.Scan(prefix, after(prefix), func(key, value []byte) error {
		var row T
		if err := decode(key, value, &row); err != nil {
			return err
		}
		return visit(row)
	})
}

// all returns the rows whose keys start with prefix.
func all[T any](r Reader, prefix []byte) ([]T, error) {
	var rows []T
	err := each(r, prefix, func(row T) error {
		rows = append(rows, row)
		return nil
	})
	return rows, err
}
