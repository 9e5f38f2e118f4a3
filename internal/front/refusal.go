package front

import (
	"encoding/json"
	"fmt"
)

// Codes of refusals, in a range that the server does not use.
const (
	CodeUnknownKind = 60001 // no kind of event that the owner knows
	CodeNewer       = 60002 // a newer version of a kind than the owner knows
	CodeEvent       = 60003 // no event: its envelope, its headers or its body
	CodeTooLarge    = 60004
	CodeLane        = 60005 // the actor or the condition does not fit a fact or a decision
	CodeNoRoom      = 60006 // the disk is nearly full: facts are refused
	CodeDenied      = 60007 // clients may not do that
	CodeBatch       = 60008 // no batch of facts
	CodeEntry       = 60009 // no lease, cursor or witness
	CodeHeld        = 60010 // another session has the lease
	CodeBusy        = 60011 // settled by trying again

	codeWrongLast  = 10071 // the server's own: the entry has moved
	codeNoConsumer = 10014 // the server's own
)

// Refusal says why a publication was not passed on. It is answered on the reply
// subject as the server answers: with the JSON of an error.
type Refusal struct {
	Code   int // one of the codes above
	Status int // as in HTTP; 503 is settled by trying again
	Text   string
}

// Error implements error.
func (r *Refusal) Error() string { return r.Text }

func refuse(code int, format string, args ...any) *Refusal {
	return &Refusal{Code: code, Status: 400, Text: fmt.Sprintf(format, args...)}
}

// Refuse is a refusal for good.
func Refuse(code int, format string, args ...any) *Refusal { return refuse(code, format, args...) }

// WrongLast is the server's own refusal of a write to an entry that is at another
// sequence.
func WrongLast(at uint64) *Refusal { return refuse(codeWrongLast, "wrong last sequence: %d", at) }

func busy(err error) *Refusal {
	return &Refusal{Code: CodeBusy, Status: 503, Text: err.Error()}
}

// answer is the refusal on the wire.
func (r *Refusal) answer() []byte {
	type apiError struct {
		Code    int    `json:"code"`
		ErrCode int    `json:"err_code"`
		Text    string `json:"description"`
	}
	text, err := json.Marshal(struct {
		Error  apiError `json:"error"`
		Stream string   `json:"stream"`
		Seq    uint64   `json:"seq"`
	}{Error: apiError{r.Status, r.Code, r.Text}})
	if err != nil {
		panic("encode a refusal: " + err.Error()) // a struct of strings and numbers
	}
	return text
}
