package worker

import (
	"cmp"
	"encoding/json"
	"os"
	"slices"
	"strconv"
)

// failure is the bad end of one rank's process.
type failure struct {
	exit
	told   told
	at     int64 // when the process had ended, in unix seconds
	victim bool  // it ended without a word after another's failure had ended the group
}

func (f failure) String() string {
	if f.told.message == "" {
		return f.exit.String()
	}
	return f.exit.String() + ": " + f.told.message
}

// rootCause is the failure that came first by what the workers tell, in whole
// seconds, or else by the order of their ends; victims come last.
func rootCause(failures []failure) failure {
	when := func(f failure) int64 {
		if f.told.at > 0 {
			return f.told.at
		}
		return f.at
	}
	order := slices.SortedStableFunc(slices.Values(failures), func(a, b failure) int {
		switch {
		case a.victim != b.victim && a.victim:
			return 1
		case a.victim != b.victim:
			return -1
		}
		return cmp.Compare(when(a), when(b))
	})
	return order[0]
}

// told is what a worker says of its own failure, in the file of torchelastic's
// record decorator:
//
//	{"message": {"message": …, "extraInfo": {"py_callstack": …, "timestamp": "<unix>"}}}
//	{"message": "…"}
type told struct {
	message   string
	traceback string
	at        int64 // unix seconds; 0 when it does not say
}

// errorFile is what rank has told, if anything.
func (w *watch) errorFile(rank int) told {
	data, err := os.ReadFile(w.file(rank, "error.json"))
	if err != nil {
		return told{} // most workers leave none
	}
	var full struct {
		Message struct {
			Message   string
			ExtraInfo struct {
				Callstack string `json:"py_callstack"`
				Timestamp string
			}
		}
	}
	if json.Unmarshal(data, &full) == nil {
		m := full.Message
		at, _ := strconv.ParseInt(m.ExtraInfo.Timestamp, 10, 64) // 0 when it is not a number
		return told{m.Message, m.ExtraInfo.Callstack, at}
	}
	var plain struct{ Message string }
	if json.Unmarshal(data, &plain) == nil {
		return told{message: plain.Message}
	}
	return told{message: string(data[:min(len(data), 1000)])}
}
