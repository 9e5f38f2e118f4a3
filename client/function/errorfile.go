package function

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// envErrorFile is torchelastic's: where a worker says why it failed.
const envErrorFile = "TORCHELASTIC_ERROR_FILE"

// writeErrorFile says why the function failed, in the form of torchelastic's
// record decorator.
func writeErrorFile(err error) error {
	path := os.Getenv(envErrorFile)
	if path == "" {
		return nil
	}
	traceback := chain(err)
	if e := (*Error)(nil); errors.As(err, &e) {
		traceback = e.Traceback
	}
	text, jerr := json.Marshal(map[string]any{"message": map[string]any{
		"message": err.Error(),
		"extraInfo": map[string]string{
			"py_callstack": traceback, "timestamp": strconv.FormatInt(time.Now().Unix(), 10),
		},
	}})
	if jerr != nil {
		return fmt.Errorf("write the error file: %w", jerr)
	}
	if werr := os.WriteFile(path, text, 0o600); werr != nil {
		return fmt.Errorf("write the error file: %w", werr)
	}
	return nil
}
