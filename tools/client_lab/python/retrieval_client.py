"""Embeddings with the openai package and LangChain, and reranking with the cohere package."""

import cohere
from lab import KEY, URL, V1, expect
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

MODEL = "local"
QUERY, DOCUMENTS = "Who had a dog?", ["Tom had a dog.", "The cat sat.", "It was dark."]
WIDTH = 128  # of the model's embeddings


def is_close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True)
    )


openai = OpenAI(base_url=V1, api_key=KEY)
answer = openai.embeddings.create(model=MODEL, input=DOCUMENTS)  # It asks for base64.
embeddings = [each.embedding for each in answer.data]
expect([len(each) for each in embeddings], [WIDTH] * 3)
floats = openai.embeddings.create(model=MODEL, input=DOCUMENTS[1], encoding_format="float")
expect(is_close(floats.data[0].embedding, embeddings[1]), True)
short = openai.embeddings.create(model=MODEL, input=DOCUMENTS, dimensions=16)
expect([len(each.embedding) for each in short.data], [16] * 3)

# Without it, LangChain sends the tokens of a tokenizer of OpenAI's.
langchain = OpenAIEmbeddings(
    model=MODEL, base_url=V1, api_key=KEY, check_embedding_ctx_length=False
)
found = langchain.embed_documents(DOCUMENTS * 500)
expect(len(found), 1500)
expect(is_close(found[4], embeddings[1]), True)

newer = cohere.ClientV2(api_key=KEY, base_url=URL)
ranked = newer.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS).results
scores = [each.relevance_score for each in ranked]
expect(scores, sorted(scores, reverse=True))
expect(sorted(each.index for each in ranked), [0, 1, 2])
older = cohere.Client(api_key=KEY, base_url=URL)
[best] = older.rerank(
    model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=True
).results
expect(best.index, ranked[0].index)
expect(best.document.text, DOCUMENTS[best.index])
